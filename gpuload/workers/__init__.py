"""The worker processes: `pool` is the parent's side, `main` the child's, `protocol` what they say to each other."""
