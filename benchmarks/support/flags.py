"""The flags that several benchmarks share. A benchmark calls `define` with the names of its flags; absl does the rest.

A list flag is a tuple: FLAGS.batch is (1024,) after --batch=1024. A benchmark's own flags are in its own module.
"""

import re
from collections.abc import Callable
from typing import Any

from absl import flags

from benchmarks.support.cases import LOGITS

FLAGS = flags.FLAGS

FUNCTIONS = ("softmax", "log_softmax", "logsumexp")
IMPLEMENTATIONS = ("auto", "mosaic_gpu", "triton", "xla")

# --help lists a flag under the module that defines it. This makes absl see the caller of this module, the benchmark.
flags.disclaim_key_flags()


class Items(flags.ArgumentParser):
    """Parses items separated by commas into a tuple without repetitions."""

    def __init__(self, pattern: str, accepted: str, item: Callable[[str], Any] = str, empty: bool = False):
        self.pattern, self.item, self.empty = re.compile(pattern, re.ASCII), item, empty
        self.syntactic_help = f"a list of {accepted}, separated by commas"

    def parse(self, argument: str) -> tuple:
        texts = argument.split(",") if argument else []
        if not (texts or self.empty) or not all(map(self.pattern.fullmatch, texts)):
            raise ValueError(f"it takes {self.syntactic_help}")
        return tuple(dict.fromkeys(map(self.item, texts)))


_INTEGER = r"0*[1-9]\d*"
INTEGERS = Items(_INTEGER, "positive integers", int)


def words(names: Any, empty: bool = False) -> Items:
    return Items("|".join(names), f"any of {', '.join(names)}", empty=empty)


def _shapes(with_k: bool) -> Items:
    form = "BATCHxV or BATCHxVxK" if with_k else "BATCHxV"
    pattern = rf"{_INTEGER}(x{_INTEGER}){{1,{1 + with_k}}}"
    return Items(pattern, f"{form}, such as 4000x1000", lambda text: tuple(map(int, text.split("x"))), True)


# name: parser, default, help
_LISTS = {
    "batch": (INTEGERS, "1024", "Rows of the logits."),
    "vocab": (INTEGERS, "4096,32000", "Row lengths V; every batch runs with every V."),
    "k": (INTEGERS, "5", "How many winners a row has."),
    "sequence": (INTEGERS, "1024", "How many tokens a sequence has."),
    "dtype": (words(("float32", "bfloat16", "float16")), "float32", "Element types."),
    "function": (words(FUNCTIONS), "softmax", "The function to compute."),
    "where": (
        words(("none", "full", "vocab", "rows")),
        "none",
        "The mask, which keeps 70%: none; full (one entry per logit); vocab (one mask for all rows); rows (masks"
        " whole rows).",
    ),
    "axis": (Items("-1|0", "any of -1, 0", int), "-1", "The axis of V; 0 means logits of shape (V, batch)."),
    "direction": (
        words(("forward", "backward", "both")),
        "forward",
        "What one call computes: the outputs; the gradient, from values that a forward call kept; or both.",
    ),
    "implementations": (
        words(IMPLEMENTATIONS, empty=True),
        "auto",
        "Which of our implementations to time; auto is what users get by default.",
    ),
    "logits": (
        words(LOGITS),
        "normal",
        f"The input: {'; '.join(f'{name} ({text})' for name, (text, _) in LOGITS.items())}.",
    ),
}
# name: default, help, least value
_INTEGERS = {
    "tokens": (4096, "Tokens per batch.", 1),
    "width": (1024, "Size of a token's hidden state.", 1),
    "training_steps": (400, "Training steps of the language model.", 1),
    "seed": (0, "Seed of all random numbers.", 0),
    "repeats": (50, "At most this many samples per contender and case (GPUs take them in tens).", 1),
}


def define_list(name: str, parser: Items, default: str, text: str) -> None:
    flags.DEFINE(parser, name, default, text, serializer=flags.ListSerializer(","))


def define_words(name: str, names: Any, text: str, default: str | None = None) -> None:
    """The default is all of the names."""
    define_list(name, words(names), ",".join(names) if default is None else default, text)


def define(*names: str, **texts: str) -> None:
    """Defines shared flags, and the flags of the output. `texts` defines flags with another help."""
    for name in (*names, *texts):
        if name == "shapes":
            with_k = "k" in names
            times = "Pairs in place of every --batch with every --vocab"
            define_list(name, _shapes(with_k), "", times + "; a K in place of --k." * with_k)
        elif name in _LISTS:
            parser, default, text = _LISTS[name]
            define_list(name, parser, default, texts.get(name, text))
        elif name in _INTEGERS:
            default, text, least = _INTEGERS[name]
            flags.DEFINE_integer(name, default, texts.get(name, text), least)
    if "repeats" in names:
        text = "Time budget of one case, shared by all contenders. Each one gets at least three samples."
        flags.DEFINE_float("seconds", 2.0, text, 0.0)
    if "output_dir" not in FLAGS:
        flags.DEFINE_string("output_dir", "benchmarks/results/local", "Folder of the results.")
        flags.DEFINE_string("commit", "", "Commit to record if the code is not in a git checkout.")


def define_decoding(**texts: str) -> None:
    """Defines the flags of a benchmark that decodes with the language model."""
    define("vocab", "width", "training_steps", "dtype", "implementations", "seed", "repeats", "tokens")
    define(**texts, sequence="How many tokens are decoded, one after the other.")


def define_peers(*of: dict[str, str], default: tuple[str, ...] = ("jax", "jax_stable", "jax_unstable")) -> None:
    """Defines --peers. `of` has the names of peers with explanations."""
    names = {name: text for peers in of for name, text in peers.items()}
    default = tuple(name for name in default if name in names)
    text = "; ".join(f"{name} ({text})" for name, text in names.items())
    define_list("peers", words(names, empty=True), ",".join(default), f"The peers to compare with: {text}.")
