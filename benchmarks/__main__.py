"""Both benchmarks with the same flags: python -m benchmarks --flagfile=configs/smoke.flags."""

from absl import app, flags

from benchmarks import settings, softmax, topk


def main(argv: list[str]) -> int:
    return max(softmax.main(argv), topk.main(argv))


if __name__ == "__main__":
    settings.define()
    flags.adopt_module_key_flags(settings)  # so that --help lists them
    app.run(main)
