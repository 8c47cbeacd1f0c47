"""The variant `tiny` of nemo_rl_rlvr: five steps on one GPU, to check the installation."""

from configs.nemo_rl_rlvr import *

run_dir = "runs/nemo_rl_rlvr_tiny"
steps = 5
val_period = 5
save_period = 5

prompts_per_step = 8
group_size = 2
sampling = {"max_model_len": 2048, "max_response_tokens": 256}
loss = {"updates_per_batch": 1}
engine = engine | {"count": 1}
policy = policy | {"ranks": 1}
