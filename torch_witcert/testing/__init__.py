"""Float64 oracles, adversarial inputs and searches for counterexamples: shipped, used by the tests and by evaluation."""
