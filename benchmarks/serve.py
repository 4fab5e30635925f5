"""How fast does a server decode with sample? python -m benchmarks.serve --flagfile=configs/serve.flags

The language model of benchmarks.beam_search continues --batch requests together, by --sequence tokens each. A
request has its own temperature, top_k, top_p and min_p, which are all traced. It also has its own seed, so that
its text does not depend on the other requests of the batch. One jitted program computes the texts from the
prompts. The contenders draw a token in different ways:

sort   plain JAX: sort every row, sum cumulatively, and draw from the rest with jax.random.categorical. The sort is
       necessary because top_k and top_p differ between rows.
ours   sample

Every step of a few requests is replayed. The replay compares the tokens drawn by `sample` with the float64 oracle,
given the same u. Tokens per second are --batch times --sequence, over the wall time of a call.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app
from jax import lax

import pallas_softmax
from benchmarks import beam_search
from benchmarks.beam_search import choose_prompts, model, prefill, token_ids, train
from benchmarks.support import flags, report, timing
from benchmarks.support.contenders import Call, jax_call, named
from benchmarks.support.driver import note, progress, require_extra
from tests.support import bounds

_CHECKED = 8  # requests, replayed from first to last step
# The requests cycle through these parameters. The first one is greedy.
_NAMES = ("temperature", "top_k", "top_p", "min_p")
_KINDS = [
    (0.0, 1, 1.0, 0.0),
    (0.7, 50, 0.9, 0.0),
    (1.0, 2**31 - 1, 0.95, 0.0),
    (1.0, 40, 1.0, 0.05),
    (1.3, 2**31 - 1, 1.0, 0.1),
    (0.8, 20, 0.8, 0.02),
    (1.0, 2**31 - 1, 1.0, 0.0),
]


@dataclasses.dataclass(frozen=True)
class Service:
    """Requests that are decoded together: their number, the vocabulary and the length."""

    batch: int
    vocab: int
    dtype: str  # of the output layer and the logits
    sequence: int

    @property
    def label(self) -> str:
        """A short name of the service."""
        return f"{self.batch} requests V={self.vocab} {self.dtype}, {self.sequence} tokens"


@dataclasses.dataclass
class Row:
    """The columns of the CSV for one contender and one service. Empty columns were not measured."""

    service: Service
    contender: str  # sort, or one of our implementations
    ours: bool
    ran: str = ""  # the implementation found in the lowered program
    status: str = "ok"  # ok, FAILED, not run, error
    reason: str = ""
    draws_checked: int = 0
    samples: int = 0
    p20_us: float | None = None  # wall time of a call
    p50_us: float | None = None
    p80_us: float | None = None
    tokens_per_s: float | None = None
    speedup: float | None = None  # p50 of sort over this p50
    device_us_per_step: float | None = None  # time of the kernels in a step, on a GPU
    first_result_s: float | None = None
    explain: str = ""

    @property
    def fails(self) -> bool:
        """Whether this row makes the run fail."""
        return self.status in ("FAILED", "error")


def requests(batch: int) -> dict[str, jax.Array]:
    """Returns the parameters of the requests, by the argument names of `sample`."""
    columns = zip(*(_KINDS[i % len(_KINDS)] for i in range(batch)))
    return {name: jnp.array(column) for name, column in zip(_NAMES, columns)}


def keys_of(seeds: jax.Array, step: Any) -> jax.Array:
    """Returns each request's key for one step."""
    return jax.vmap(jax.random.fold_in, (0, None))(seeds, step)


def by_sort(keys: jax.Array, logits: jax.Array, asked: dict[str, jax.Array]) -> tuple[jax.Array]:
    """Draws a token from each row, with a sort."""
    temperature, top_k, top_p, min_p = (asked[name][:, None] for name in _NAMES)
    x = logits.astype(jnp.float32) / jnp.where(temperature > 0, temperature, 1)
    tokens = jnp.argsort(x, -1, descending=True)
    x = jnp.take_along_axis(x, tokens, -1)
    p = jax.nn.softmax(jnp.where(jnp.arange(x.shape[-1]) < top_k, x, -jnp.inf))
    kept = (jnp.cumsum(p, -1) - p < top_p) & (p >= min_p * p[:, :1]) & (p > 0)
    drawn = jax.vmap(jax.random.categorical)(keys, jnp.where(kept, x, -jnp.inf))
    drawn = jnp.where(temperature[:, 0] > 0, drawn, 0)
    return (jnp.take_along_axis(tokens, drawn[:, None], -1)[:, 0],)


def ours(name: str, keys: jax.Array, logits: jax.Array, asked: Any) -> Any:
    """Draws a token from each row, with `sample`. Returns the fields of its result."""
    return tuple(pallas_softmax.sample(keys, logits, **asked, implementation=named(name)))


def decode(draw: Any, length: int, weights: Any, prompts: jax.Array, seeds: jax.Array, asked: Any) -> Any:
    """Continues the prompts. Returns everything that `draw` returned, stacked over the steps.

    Args:
      draw: (keys, logits, parameters) -> a tuple of arrays with one entry per row. The first holds the tokens.
      length: how many tokens to draw for each request.
      weights, prompts: the model, and (batch, PROMPT) tokens.
      seeds, asked: the key and the parameters of each request.
    """

    def step(carry: Any, i: jax.Array) -> tuple[Any, jax.Array]:
        hidden, token = carry
        hidden, logits = model(weights, hidden, token)
        drawn = draw(keys_of(seeds, i), logits, asked)
        return (hidden, drawn[0]), drawn

    start = prefill(weights, prompts), prompts[:, -1]
    return {"drawn": lax.scan(step, start, jnp.arange(length))[1]}


@jax.jit
def replay(weights: Any, prompts: jax.Array, tokens: jax.Array) -> jax.Array:
    """Returns the logits behind the tokens of the checked requests, (length, checked, V).

    The model runs on all requests, because a matrix product with fewer rows may run another kernel, which would
    round differently.
    """

    def step(carry: Any, token: jax.Array) -> tuple[Any, jax.Array]:
        hidden, logits = model(weights, *carry)
        return (hidden, token), logits[:_CHECKED]

    _, logits = lax.scan(step, (prefill(weights, prompts), prompts[:, -1]), tokens)
    return logits


def check(drawn: Any, weights: Any, prompts: jax.Array, seeds: jax.Array, asked: Any) -> int:
    """Compares the draws of some requests with the oracle and raises on a mismatch. Returns how many were checked."""
    logits = np.asarray(replay(weights, prompts, drawn[0]))
    drawn = [of[:, :_CHECKED] for of in drawn]
    asked = {name: np.asarray(of[:_CHECKED]) for name, of in asked.items()}
    for i, x in enumerate(logits):
        keys = keys_of(seeds[:_CHECKED], i)
        u = np.asarray(jax.vmap(lambda key: jax.random.uniform(key, (), jnp.float32))(keys))
        names = [f"step {i}, request {j}" for j in range(len(x))]
        bounds.assert_sample([of[i] for of in drawn], x, u, names, **asked)
    return logits.shape[0] * logits.shape[1]


def _prepare(row: Row, *arguments: Any) -> Call:
    """Compiles a contender's program, describes it in its row, and checks ours against the oracle."""
    service, name = row.service, row.contender
    draw = functools.partial(ours, name) if row.ours else by_sort
    call = jax_call(
        functools.partial(decode, draw, service.sequence), *arguments, ran="" if row.ours else "jax"
    )
    row.ran, row.first_result_s = call.ran, call.first_result_s
    if row.ours:
        _, _, seeds, asked = arguments
        logits = jax.ShapeDtypeStruct((service.batch, service.vocab), service.dtype)
        (choice,) = pallas_softmax.explain(functools.partial(ours, name), seeds, logits, asked)
        said, row.explain = choice.cuda if timing.on_gpu() else choice.elsewhere, str(choice)
        if said != row.ran or name not in ("auto", said):
            raise AssertionError(f"asked for {name}, explained as {said}, lowered to {row.ran}")
        row.draws_checked = check(call.run()["drawn"], *arguments)
    return call


def run_service(service: Service, chosen: flags.Settings, weights: dict[str, jax.Array]) -> list[Row]:
    """Checks every contender of one service, then times them together."""
    names = ["sort", *chosen.implementations]
    rows = {name: Row(service, name, ours=name != "sort") for name in names}
    weights = weights | {"embed": weights["embed"].astype(service.dtype)}
    prompts = jnp.asarray(choose_prompts(token_ids(service.vocab), service.batch))
    seeds = jax.random.split(jax.random.key(chosen.seed), service.batch)
    calls: dict[str, Call] = {}
    for name, row in rows.items():
        try:
            calls[name] = _prepare(row, weights, prompts, seeds, requests(service.batch))
        except AssertionError as error:
            row.status, row.reason = "FAILED", str(error)[:400]
        except Exception as error:
            note(row, error)
    beam_search.write_times(rows, calls, chosen, service.batch * service.sequence, service.sequence, "sort")
    return list(rows.values())


def make_services(chosen: flags.Settings) -> list[Service]:
    """Returns one service per combination of the flags' values."""
    return [
        Service(batch, vocab, dtype, sequence)
        for vocab in chosen.vocab
        for dtype in chosen.dtype
        for batch in chosen.batch
        for sequence in chosen.sequence
    ]


def table(rows: list[Row]) -> str:
    """Returns the rows as aligned text, with a heading per service and the columns explained at the end."""
    head = ["  contender", "ran", "check", "draws", "tokens/s", "speed-up", "device us/step", "first s"]

    def cells(row: Row, notes: report.Notes) -> list[str]:
        line = [f"  {row.contender}", row.ran, report.status_cell(row, notes), str(row.draws_checked or "")]
        line += [report.cell(row.tokens_per_s), report.cell(row.speedup, "{:.2f}x")]
        return [*line, report.cell(row.device_us_per_step), report.cell(row.first_result_s, "{:.2f}")]

    texts = {
        "ran": report.RAN,
        "draws": "how many draws were checked against the float64 oracle",
        "speed-up": report.SPEEDUP,
        "device us/step": "the device time of the kernels in one step, including the model",
        "first s": report.FIRST,
    }
    return report.grouped(head, rows, lambda row: row.service.label, cells, texts)


def define_flags() -> None:
    """Defines the flags of this benchmark."""
    flags.define_integers("batch", "How many requests are decoded together.")
    flags.define_decoding()


def main(argv: list[str]) -> int:
    """Runs the benchmark and returns its exit code."""
    chosen = flags.read(argv)
    require_extra()
    trained = functools.cache(lambda vocab: train(vocab, chosen)[0])
    todo = make_services(chosen)
    rows = [row for s in progress(todo, "serve") for row in run_service(s, chosen, trained(s.vocab))]
    where = report.environment(chosen.commit)
    report.write("serve", rows, chosen, where)
    print(f"\nserve on {where['device']}, jax {where['jax']}; wall time of a whole decoding")
    print(table(rows))
    print(f"files: {chosen.output_dir}/serve.csv, .json")
    return report.exit_code("serve", sum(row.fails for row in rows), rows)


if __name__ == "__main__":
    define_flags()
    app.run(main)
