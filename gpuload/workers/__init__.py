"""The worker processes: `pool` is the parent's side, `main` the child's side, `protocol` the messages between them."""
