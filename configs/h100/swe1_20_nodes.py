"""SWE 1 of Nemotron 3 Super on 20 H100 nodes: 4 generate, 16 train."""

from configs.h100.swe1 import *

run_dir = "runs/swe1_20_nodes"
save_before = 5400
timeouts = timeouts | {"rollout": 14400.0}
engine = engine | {
    "count": 4,
    "args": engine["args"] | {"gpu_memory_utilization": 0.75, "max_num_seqs": 16},
}
policy = policy | {"ranks": 128, "cp": 8, "ep": 16}
