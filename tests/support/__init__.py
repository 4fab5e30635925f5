"""Helpers that the tests share. No test file imports another test file.

oracle           the right answers, in NumPy float64; the benchmarks use them as well
bounds           the error that rounding may cause, with the reasons
cases            rows, masks and cotangents, with a reason for each
linear           oracle, bounds and cases of a projection and its loss
draws            the parameters of `sample`, and a test of the distribution of its draws
covering         few combinations of parameters that cover every pair of values; the fast set
trees            comparisons of trees of results
calls            calls that test the choice and the plans of mosaic_gpu and triton
plans            the GPUs that plans are made for, and what every tile must satisfy
twins            Pallas's interpreter with a twin in plain JAX of each function with inline PTX
triton_kernels   the kernels of triton with a given plan
gpu              the public functions on a GPU with a named implementation, and checks of their results
lowering         functions lowered for a platform, and the kernels in the lowered text
ptx              runs the text of inline PTX in Python
racecheck        which hazards of compute-sanitizer's racecheck count

tests/programs has the programs that tests start in processes of their own.
"""
