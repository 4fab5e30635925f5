"""What the tests share. No test file imports another.

oracle        the right answers, in NumPy float64; the benchmarks judge by them, too
bounds        how far from them rounding may lead, with the reasons
cases         rows, masks and cotangents, with the reasons for each
covering      few combinations of parameters that have every pair of values; which are of the fast set
calls         calls whose choice and plans are tested for mosaic_gpu and for triton
draws         the parameters of draws, and the test of their distribution
kernels       the kernels of mosaic_gpu with a given plan; the only file here that names the package's internals
lowering      functions lowered for a platform, and the kernels in the text
paper_checks  what the paper's seven algorithms must return

tests/programs has what tests start in processes of their own.
"""
