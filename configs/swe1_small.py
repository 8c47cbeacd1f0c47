"""SWE 1 of Nemotron 3 Super on 8 B200 nodes: 4 generate, 4 train."""

from configs.swe1 import *

run_dir = "runs/swe1_small"
steps = 1590
save_before = 2400
prompts_per_step = 32
sampling = sampling | {"max_model_len": 32768, "max_response_tokens": 32768}
engine = engine | {"count": 4, "args": engine["args"] | {"max_num_seqs": 16}}
policy = policy | {"ranks": 32, "row_tokens": 32768, "cp": 4, "ep": 16}
