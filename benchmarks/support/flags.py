"""The flags that the benchmarks share, and the checked settings that they become.

A benchmark calls the `define_...` functions of exactly those flags that it uses. absl refuses all others. The
defaults are in `Settings`.
"""

import dataclasses
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from absl import flags

DTYPES = ("float32", "bfloat16", "float16")
FUNCTIONS = ("softmax", "log_softmax", "logsumexp")
WHERES = ("none", "full", "vocab", "rows")
AXES = ("-1", "0")
DIRECTIONS = ("forward", "backward", "both")
IMPLEMENTATIONS = ("auto", "mosaic_gpu", "triton", "xla")
SOFTMAX_PEERS = {
    "jax": "jax.nn's function",
    "torch": "the function of torch",
    "quack": "QuACK's softmax",
}
TOPK_PEERS = {
    "jax_stable": "jax.nn.softmax, then lax.top_k",
    "jax_unstable": "the same with is_stable=False",
    "jax_raft": "jax_stable, for which XLA may take the kernels of RAFT",
    "torch": "softmax, then topk of torch",
    "quack": "softmax, then topk of QuACK",
}
PROGRAMS = ("block", "block_where", "attention", "attention_causal", "loss_take", "loss_lse")
SAMPLE_PEERS = {
    "jax": "jax.random.categorical, after lax.top_k or a sort for filters",
    "torch": "softmax and multinomial of torch, after its topk or sort",
    "flashinfer": "FlashInfer's softmax and sampling, by rejection for top_k and top_p",
}
SAMPLE_FILTERS = ("none", "min_p", "top_k", "top_p", "top_k_top_p", "all")
SOFTMAX_ALGORITHMS = ("naive", "safe", "online")
TOPK_ALGORITHMS = ("topk", "safe_unfused", "safe_fused", "online_fused")
LOGITS = {
    "normal": "standard normal numbers",
    "uniform": "0 to 1, as the paper's benchmark draws them",
    "peaked": "normal, one in 1000 times 20",
    "ties": "normal, rounded to integers",
    "quantized": "normal, drawn in bfloat16",
    "constant": "all 1",
    "two_values": "0 or 1",
    "ascending": "from -4 to 4",
    "descending": "from 4 to -4",
    "close": "1 and less than 2^-11 more: alike in their upper bits",
    "blocked": "normal, 256 in the middle 10 higher",
    "one_lane": "normal, four in 1024 10 higher: one thread's",
    "neg_inf": "all -inf",
    "one_finite": "all -inf but one",
    "nan": "normal, a third of it NaN",
}

_MAY_BE_EMPTY = ("shapes", "peers")

# Parsers for the items of a list. Items without one stay words.
_ITEMS: dict[str, Callable[[str], Any]] = {
    "batch": int,
    "vocab": int,
    "shapes": lambda item: tuple(map(int, item.split("x"))),
    "axis": int,
    "k": int,
    "sequence": int,
    "devices": int,
}

# --help lists a flag under the module that defines it. This makes absl see the caller of this module, the program.
flags.disclaim_key_flags()


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of a run: the values of its flags. A flag that the benchmark lacks keeps its default."""

    batch: tuple[int, ...] = (1024,)
    vocab: tuple[int, ...] = (4096, 32000)
    shapes: tuple[tuple[int, ...], ...] = ()  # (batch, V) or (batch, V, k)
    dtype: tuple[str, ...] = ("float32",)
    function: tuple[str, ...] = ("softmax",)
    where: tuple[str, ...] = ("none",)
    axis: tuple[int, ...] = (-1,)
    k: tuple[int, ...] = (5,)
    direction: tuple[str, ...] = ("forward",)
    implementations: tuple[str, ...] = ("auto",)
    peers: tuple[str, ...] = ("jax", "jax_stable", "jax_unstable")
    algorithms: tuple[str, ...] = SOFTMAX_ALGORITHMS
    filters: tuple[str, ...] = SAMPLE_FILTERS
    logits: tuple[str, ...] = ("normal",)
    seed: int = 0
    repeats: int = 50
    seconds: float = 2.0
    programs: tuple[str, ...] = PROGRAMS
    sequence: tuple[int, ...] = (1024,)
    tokens: int = 4096
    heads: int = 8
    width: int = 1024
    training_steps: int = 400
    head: tuple[str, ...] = ("small",)
    reduction: tuple[str, ...] = ("mean",)
    sharding: tuple[str, ...] = ("batch", "vocab")
    devices: tuple[int, ...] = (1, 2, 4, 8)
    axis_type: str = "Auto"
    output_dir: str = "benchmarks/results/local"
    commit: str = ""


# --- Definitions and validation -------------------------------------------------------------------------


def _default(name: str) -> Any:
    """Returns the default of a flag."""
    return getattr(Settings(), name)


def refuse(name: str, value: object, accepted: str) -> None:
    """Raises an error that names the flag, its value, and the accepted values."""
    raise flags.ValidationError(f"--{name}={value} is not accepted; {accepted}")


def _define_list(name: str, default: tuple, accepted: str, ok: Callable[[str], bool], text: str) -> None:
    """Defines a comma-separated flag. `ok` must accept each of its items."""

    def check(items: list[str]) -> bool:
        if not items and name not in _MAY_BE_EMPTY:
            refuse(name, "", f"it takes {accepted}")
        for item in items:
            if not ok(item):
                refuse(name, item, f"it takes {accepted}")
        return True

    flags.DEFINE_list(name, [str(item) for item in default], f"{text} A list: {accepted}.")
    flags.register_validator(name, check)


def define_integers(name: str, text: str) -> None:
    """Defines a flag that holds a list of positive integers."""
    accepted = "positive integers separated by commas"
    _define_list(name, _default(name), accepted, lambda item: item.isdecimal() and int(item) > 0, text)


def define_words(name: str, words: tuple[str, ...], text: str, default: tuple[str, ...] = ()) -> None:
    """Defines a flag that holds a list of some of the words. The default comes from Settings unless given."""
    accepted = f"any of {', '.join(words)}, separated by commas"
    _define_list(name, default or _default(name), accepted, words.__contains__, text)


def define_integer(name: str, text: str, least: int = 1) -> None:
    """Defines a flag that holds one integer, at least `least`."""
    flags.DEFINE_integer(name, _default(name), text, least)


def define_word(name: str, words: tuple[str, ...], text: str) -> None:
    """Defines a flag that holds one of the words."""
    flags.DEFINE_enum(name, _default(name), list(words), text)


# --- The input ------------------------------------------------------------------------------------------


def define_shapes(with_k: bool = False) -> None:
    """Defines --batch, --vocab, and --shapes to replace them. Also defines --k if a shape may name its k."""
    define_integers("batch", "Rows of the logits, taken from the start of a .npy file.")
    define_integers("vocab", "Row lengths V; every batch runs with every V.")
    in_place = "Pairs in place of every --batch with every --vocab"
    if with_k:
        define_integers("k", "How many winners a row has.")
        form, text, times = "BATCHxV or BATCHxVxK", f"{in_place}; a K in place of --k.", "{1,2}"
    else:
        form, text, times = "BATCHxV", f"{in_place}.", "{1}"
    pattern = re.compile(rf"0*[1-9]\d*(x0*[1-9]\d*){times}", re.ASCII)
    accepted = f"{form}, such as 4000x1000, separated by commas"
    _define_list("shapes", (), accepted, lambda item: pattern.fullmatch(item) is not None, text)


def define_dtype() -> None:
    """Defines --dtype."""
    define_words("dtype", DTYPES, "Element types of the logits.")


def define_logits() -> None:
    """Defines --logits and --seed, which determine the input."""
    _define_list(
        "logits",
        _default("logits"),
        f"any of {', '.join(LOGITS)} and paths of existing .npy files, separated by commas",
        _is_logits,
        f"The input: {'; '.join(map(logits_text, LOGITS))}; or your own file, which is memory-mapped and gives"
        " its own V (the last axis; the others are rows).",
    )
    define_seed()


def logits_text(logits: str) -> str:
    """Returns a kind of logits with its description in brackets. A user's file appears by its name."""
    return f"{os.path.basename(logits)} ({LOGITS.get(logits, 'a file')})"


def _is_logits(item: str) -> bool:
    return item in LOGITS or (item.endswith(".npy") and Path(item).is_file())


def define_seed() -> None:
    """Defines --seed."""
    define_integer("seed", "Seed of all random numbers.", 0)


# --- Functions and contenders ---------------------------------------------------------------------------


def define_function() -> None:
    """Defines --function, --where and --axis: the function, and its arguments in addition to the logits."""
    define_words("function", FUNCTIONS, "The function to compute.")
    define_words(
        "where",
        WHERES,
        "The mask, which keeps 70%: none; full (one entry per logit); vocab (one mask for all rows); rows (masks"
        " whole rows).",
    )
    define_words("axis", AXES, "The axis of V; 0 means logits of shape (V, batch).")


def define_direction() -> None:
    """Defines --direction."""
    define_words(
        "direction",
        DIRECTIONS,
        "What one call computes: the outputs; the gradient, from values that a forward call kept; or both.",
    )


def define_implementations() -> None:
    """Defines --implementations."""
    define_words(
        "implementations",
        IMPLEMENTATIONS,
        "Which of our implementations to time; auto is what users get by default.",
    )


def define_peers(*of: dict[str, str]) -> None:
    """Defines --peers: the peers of softmax, of top-k, or of both."""
    names = tuple(dict.fromkeys(name for peers in of for name in peers))
    texts = ("; ".join(f"{name} ({text})" for name, text in peers.items()) for peers in of)
    default = tuple(name for name in _default("peers") if name in names)
    define_words("peers", names, f"The peers to compare with: {'. For top-k: '.join(texts)}.", default)


def define_decoding() -> None:
    """Defines all flags to train a language model, decode with it, and measure that."""
    define_integers("vocab", "Sizes V of the vocabulary.")
    define_integers("sequence", "How many tokens are decoded, one after the other.")
    define_integer("tokens", "Tokens per training step.")
    define_integer("width", "Size of the hidden state.")
    define_integer("training_steps", "Training steps of the language model.")
    define_dtype()
    define_implementations()
    define_seed()
    define_timing()
    define_output()


# --- Timing and output ----------------------------------------------------------------------------------


def define_timing() -> None:
    """Defines --repeats and --seconds. Either limit ends the timing of a case."""
    define_integer("repeats", "At most this many samples per contender and case (GPUs take them in tens).")
    flags.DEFINE_float(
        "seconds",
        _default("seconds"),
        "Time budget of one case, shared by all contenders. Each one gets at least three samples.",
        0.0,
    )


def define_output() -> None:
    """Defines --output_dir and --commit."""
    flags.DEFINE_string("output_dir", _default("output_dir"), "Folder for the CSV, JSON and pictures.")
    flags.DEFINE_string(
        "commit", _default("commit"), "Commit to record if the code is not in a git checkout."
    )


# --- Values ---------------------------------------------------------------------------------------------


def read(argv: list[str]) -> Settings:
    """Returns the settings that the parsed flags ask for. Repeated items of a list count once.

    Args:
      argv: the arguments that remain after parsing. Only the program's name is allowed.
    """
    if argv[1:]:
        raise SystemExit(f"not a flag: {' '.join(argv[1:])}; lists have commas and no spaces")
    values = defined()
    for name, value in values.items():
        if isinstance(value, list):
            values[name] = tuple(dict.fromkeys(map(_ITEMS.get(name, str), value)))
    return Settings(**values)


def defined() -> dict[str, Any]:
    """Returns the flags that the running benchmark defined, with their values as parsed by absl."""
    names = (field.name for field in dataclasses.fields(Settings))
    return {name: getattr(flags.FLAGS, name) for name in names if name in flags.FLAGS}
