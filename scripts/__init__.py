"""Commands of this repository, and the parts that tests and benchmarks share with them."""
