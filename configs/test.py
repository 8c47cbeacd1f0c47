"""All components in one minute, with or without a GPU: four steps that teach nothing."""

from configs.tiny import *

run_dir = "runs/test-{time}"
steps = 4
val_period = 2
save_period = 2
sample_period = 2
engine = engine | {"verify_sync_every": 1}
