"""What the tests share. No test file imports another.

oracle           the right answers, in NumPy float64; the benchmarks judge by them, too
bounds           how far from them rounding may lead, with the reasons
cases            rows, masks and cotangents, with the reasons for each
linear           the same three for a projection and its loss
draws            the parameters of draws, and the test of their distribution
paper_checks     what the paper's seven algorithms must return
covering         few combinations of parameters that have every pair of values; which are of the fast set
calls            calls whose choice and plans are tested for mosaic_gpu and for triton
kernels          the kernels of mosaic_gpu with a given plan, in the interpreter or on a GPU
triton_kernels   the kernels of triton with a given plan
gpu              the public functions on a GPU with the kernel named, and how their results are judged
lowering         functions lowered for a platform, and the kernels in the text
ptx              runs the text of inline PTX in Python
racecheck        which hazards of compute-sanitizer's racecheck count
benchmark_cases  small cases of the benchmarks, and the results of a run

What tests start in processes of their own is in tests/programs.
"""
