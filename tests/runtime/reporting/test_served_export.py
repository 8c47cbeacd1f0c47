"""An export, served by the command that a run prints, is the policy that was trained."""

import json
import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from policy.fsdp import FSDPPolicy
from runtime.reporting.summary import model_lines
from settings.network import PolicySettings

pytestmark = pytest.mark.e2e
PROMPT = list(range(5, 37))


def logprobs(folder: Path) -> torch.Tensor:
    """Logprobs of all but the first token of PROMPT by transformers, in float32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens_T = torch.tensor(PROMPT)
    with torch.no_grad():
        logp_TV = model(tokens_T[None]).logits[0].log_softmax(-1)
    return logp_TV[:-1].gather(1, tokens_T[1:, None]).squeeze(1)


def exported(model: str, folder: Path) -> Path:
    """The export of a policy each of whose weights has moved by a ten-thousandth.

    The weights of its start are exact in bf16, and each has moved so that PROMPT becomes likelier.
    """
    start = Path(shutil.copytree(model, folder / "start"))
    exact = {
        name: w.bfloat16().float() for name, w in load_file(start / "model.safetensors").items()
    }
    save_file(exact, start / "model.safetensors", {"format": "pt"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            policy = FSDPPolicy(str(start), PolicySettings(), 1.0)
            tokens_T = torch.tensor(PROMPT)
            (-policy.model.plain(tokens_T).sum()).backward()
            with torch.no_grad():
                for weight in policy.lm.parameters():
                    weight.sub_(1e-4 * weight.abs() * weight.grad.sign())
            policy.export_hf(str(folder / "hf"))()
        finally:
            dist.destroy_process_group()
    return folder / "hf"


def asked(port: int, path: str, body: dict) -> dict:
    """The server's answer, once it answers."""
    data = json.dumps(body).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", data, {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def test_the_printed_command_serves_the_policy_that_was_trained(tiny_model, tmp_path):
    export = exported(tiny_model, tmp_path)
    _, serve = model_lines(export, [])
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = f"exec env {serve.removeprefix('serve: ')} --port {port} "
    command += "--max-model-len 64 --enforce-eager"
    env = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    with open(tmp_path / "log", "w") as log:
        how = {"stdout": log, "stderr": log, "start_new_session": True}
        server = subprocess.Popen(
            ["bash", "-c", command], env=env | {"OMP_NUM_THREADS": "1"}, **how
        )
    try:
        wanted = {"model": str(export), "prompt": PROMPT, "max_tokens": 1, "prompt_logprobs": 0}
        while True:
            assert server.poll() is None, (tmp_path / "log").read_text()[-3000:]
            try:
                answer = asked(port, "/v1/completions", wanted)
                break
            except OSError:
                time.sleep(1)
        message = [{"role": "user", "content": "abc"}]
        chat = {"model": str(export), "messages": message, "temperature": 0, "max_tokens": 12}
        said = asked(port, "/v1/chat/completions", chat)["choices"][0]["message"]["content"]
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
    places = zip(answer["choices"][0]["prompt_logprobs"][1:], PROMPT[1:], strict=True)
    served_T = torch.tensor([place[str(token)]["logprob"] for place, token in places])
    trained_T = logprobs(export)
    start_T = logprobs(tmp_path / "start")
    assert (served_T - trained_T).abs().max() < 1e-4
    assert (trained_T - start_T).abs().max() > 1e-3, "the update would not be seen"
    tokenizer = AutoTokenizer.from_pretrained(export)
    rendered = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
    ids = torch.tensor([rendered])
    model = AutoModelForCausalLM.from_pretrained(export).eval()
    greedy = model.generate(ids, do_sample=False, max_new_tokens=12)[0, len(rendered) :]
    assert said == tokenizer.decode(greedy, skip_special_tokens=True)
