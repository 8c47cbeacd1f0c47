"""Updates weights: trainers send them, engines receive and verify them."""
