"""The command line: every flag of the programs here, and the checked settings they become.

All of them know all flags, so that one flag file serves any of them.
"""

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path

from absl import flags

DTYPES = ("float32", "bfloat16", "float16")
FUNCTIONS = ("softmax", "log_softmax", "logsumexp")
WHERES = ("none", "full", "vocab", "rows")
AXES = ("-1", "0")
DIRECTIONS = ("forward", "backward", "both")
IMPLEMENTATIONS = ("auto", "mosaic_gpu", "triton", "xla")
PEERS = ("jax", "jax_stable", "jax_unstable", "jax_raft", "torch", "quack")
SOFTMAX_ALGORITHMS = ("naive", "safe", "online")
TOPK_ALGORITHMS = ("topk", "safe_unfused", "safe_fused", "online_fused")
LOGITS = {
    "normal": "",
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


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to run; the flags' values after validation, and the flags' defaults."""

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
    logits: tuple[str, ...] = ("normal",)
    seed: int = 0
    repeats: int = 50
    seconds: float = 2.0
    sequence: tuple[int, ...] = (1024,)
    tokens: int = 4096
    heads: int = 8
    width: int = 1024
    training_steps: int = 400
    sharding: tuple[str, ...] = ("batch", "vocab")
    devices: tuple[int, ...] = (1, 2, 4, 8)
    axis_type: str = "Auto"
    output_dir: str = "benchmarks/results/local"
    commit: str = ""


def _refuse(name: str, value: object, accepted: str) -> None:
    raise flags.ValidationError(f"--{name}={value} is not accepted; {accepted}")


def _list(name: str, default: tuple, accepted: str, ok: Callable[[str], bool], text: str) -> None:
    """Defines a comma-separated flag, each of whose items passes `ok`."""

    def check(items: list[str]) -> bool:
        if not items and name not in ("shapes", "peers"):
            _refuse(name, "", f"it takes {accepted}")
        for item in items:
            if not ok(item):
                _refuse(name, item, f"it takes {accepted}")
        return True

    flags.DEFINE_list(name, [str(item) for item in default], f"{text} A list: {accepted}.")
    flags.register_validator(name, check)


def _positive_ints(name: str, default: tuple, text: str) -> None:
    accepted = "positive integers separated by commas"
    _list(name, default, accepted, lambda s: s.isdecimal() and int(s) > 0, text)


def _names(name: str, default: tuple, names: tuple[str, ...], text: str) -> None:
    _list(name, default, f"any of {', '.join(names)}, separated by commas", names.__contains__, text)


def _not_mixed(algorithms: list[str]) -> bool:
    """A figure of the paper is of softmax, or of softmax and top-k."""
    kinds = (SOFTMAX_ALGORITHMS, TOPK_ALGORITHMS)
    if not any(set(algorithms) <= set(kind) for kind in kinds):
        either = " or ".join(", ".join(kind) for kind in kinds)
        _refuse("algorithms", ",".join(algorithms), f"it takes some of either {either}")
    return True


def _is_shape(item: str) -> bool:
    return re.fullmatch(r"0*[1-9]\d*(x0*[1-9]\d*){1,2}", item, re.ASCII) is not None


def _is_logits(item: str) -> bool:
    return item in LOGITS or (item.endswith(".npy") and Path(item).is_file())


def define() -> None:
    """Defines the flags; once per process."""
    default = Settings()
    _positive_ints("batch", default.batch, "Rows of the logits; of a .npy file the first so many.")
    _positive_ints("vocab", default.vocab, "Row lengths V; every batch is run with every V.")
    _list(
        "shapes",
        default.shapes,
        "BATCHxV or BATCHxVxK, such as 4000x1000, separated by commas",
        _is_shape,
        "Pairs in place of every --batch with every --vocab; a K in place of --k.",
    )
    _names("dtype", default.dtype, DTYPES, "Element types of the logits.")
    _names("function", default.function, FUNCTIONS, "What to compute (not in the topk benchmark).")
    _names(
        "where",
        default.where,
        WHERES,
        "The mask, 70% of it kept: none; full (of the logits' shape); vocab (one for all rows); rows (whole"
        " rows). Not in the topk benchmark.",
    )
    _names(
        "axis",
        default.axis,
        AXES,
        "The axis of V; with 0 the logits are the array (V, batch). Not in the topk benchmark.",
    )
    _positive_ints("k", default.k, "How many winners a row has (topk, paper), beams a prompt (beam_search).")
    _names(
        "direction",
        default.direction,
        DIRECTIONS,
        "What one call computes: the outputs; the gradient, from what the forward call kept; or"
        " both in one call.",
    )
    _names(
        "implementations",
        default.implementations,
        IMPLEMENTATIONS,
        "Which of our implementations to time; auto is what a user gets.",
    )
    _names(
        "peers",
        default.peers,
        PEERS,
        "What to compare with. softmax: jax (that of jax.nn), torch and quack. topk: jax_stable"
        " (jax.nn.softmax, then lax.top_k), jax_unstable (the same with is_stable=False), jax_raft"
        " (jax_stable, for which XLA may take the kernels of RAFT), torch and quack. A benchmark passes over"
        " the peers of the other one.",
    )
    _names(
        "algorithms",
        default.algorithms,
        SOFTMAX_ALGORITHMS + TOPK_ALGORITHMS,
        "Which of the paper's algorithms to time (paper): those of softmax, or those of softmax and top-k.",
    )
    flags.register_validator("algorithms", _not_mixed)
    _list(
        "logits",
        default.logits,
        f"any of {', '.join(LOGITS)} and paths of existing .npy files, separated by commas",
        _is_logits,
        f"The input: {'; '.join(f'{name} ({text})' if text else name for name, text in LOGITS.items())}; or"
        " your own file, which is memory-mapped and gives its own V (the last axis; the others are rows).",
    )
    flags.DEFINE_integer("seed", default.seed, "Seed of the random logits and gradients.", 0)
    flags.DEFINE_integer(
        "repeats", default.repeats, "Samples per contender and case, at most (on a GPU in tens).", 1
    )
    flags.DEFINE_float(
        "seconds",
        default.seconds,
        "Time budget of one case, all contenders together; three samples each are taken anyway.",
        0.0,
    )
    _positive_ints(
        "sequence",
        default.sequence,
        "Lengths of the transformer block's sequences (programs), of the hypotheses (beam_search).",
    )
    flags.DEFINE_integer(
        "tokens",
        default.tokens,
        "Tokens of a program's batch: rows of the classifier's logits; the block has as many sequences as"
        " hold so many, at least one. In beam_search those of a step of training.",
        1,
    )
    flags.DEFINE_integer("heads", default.heads, "Attention heads of the transformer block (programs).", 1)
    flags.DEFINE_integer(
        "width", default.width, "Size of the hidden state of a token (programs, beam_search).", 1
    )
    flags.DEFINE_integer(
        "training_steps", default.training_steps, "Steps that the language model is trained (beam_search).", 1
    )
    _names(
        "sharding",
        default.sharding,
        default.sharding,
        "How the logits lie over the devices: the rows spread over them, or each row (sharded).",
    )
    _positive_ints(
        "devices", default.devices, "Over how many devices; more than there are is passed over (sharded)."
    )
    text = "Type of the mesh axis, a jax.sharding.AxisType (sharded)."
    flags.DEFINE_enum("axis_type", default.axis_type, ["Auto", "Explicit"], text)
    flags.DEFINE_string("output_dir", default.output_dir, "Where the CSV, JSON and pictures are written.")
    flags.DEFINE_string("commit", default.commit, "Commit to record, for a copy that is no git checkout.")


def _shape(item: str) -> tuple[int, ...]:
    return tuple(map(int, item.split("x")))


# What the items of a list are, if not words.
_ITEMS = {
    "batch": int,
    "vocab": int,
    "shapes": _shape,
    "axis": int,
    "k": int,
    "sequence": int,
    "devices": int,
}


def from_flags(argv: list[str]) -> Settings:
    """The settings that the parsed flags ask for; doubled list items count once.

    argv is what is left when the flags are parsed: the program's name, and nothing else.
    """
    if argv[1:]:
        raise SystemExit(f"not a flag: {' '.join(argv[1:])}; lists have commas and no spaces")
    values = {field.name: getattr(flags.FLAGS, field.name) for field in dataclasses.fields(Settings)}
    for name, value in values.items():
        if isinstance(value, list):
            values[name] = tuple(dict.fromkeys(map(_ITEMS.get(name, str), value)))
    return Settings(**values)
