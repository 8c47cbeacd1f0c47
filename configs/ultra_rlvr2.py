"""RLVR of Nemotron 3 Ultra from step 128 to 178: the same run, resumed with longer answers."""

from configs.ultra_rlvr1 import *

data = data | {"val": "data/ultra/rlvr2/val-split.jsonl"}
steps = 178

sampling = sampling | {"max_model_len": 65536, "max_response_tokens": 65536}
services = services | {"genrm": services["genrm"] | {"answer_length": 0.08}}
policy = policy | {"row_tokens": 65536}
