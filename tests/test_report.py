"""The page of a run, opened in a browser: its curves, tables, rollouts and tokens."""

import functools
import html
import itertools
import json
import math
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from conftest import save_tokenizer

import report
from core.errors import InputError
from support.program import ran

CHROMIUM = shutil.which("chromium")
ABSENT = pytest.mark.skipif(not CHROMIUM, reason="chromium is absent: the page was not opened")
ATTACK = "</script><script>document.title='pwned'</script><img src=x onerror=\"document.title=1\">"
ENVS = ["math", "code"]
STEPS = 30


def write_lines(path: Path, lines: list[dict], rest: str = "") -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + rest)


def metric_lines() -> list[dict]:
    """STEPS training lines, and validation at every tenth."""
    lines = []
    for step in range(STEPS + 1):
        reward = step / STEPS
        if step:
            line = {"step": step, "seconds": 9.0 * step, "reward": reward, "lag_mean": 0.5}
            line |= {f"reward/{env}": reward / (i + 1) for i, env in enumerate(ENVS)}
            line |= {f"reward/math/{name}": reward for name in ("gsm8k", "aime")}
            line |= {"truncated_samples": 0.1, "truncated_samples/math": 0.1}
            line |= {"truncated_samples/math/gsm8k": 0.0, "truncated_samples/math/aime": 0.2}
            line |= {f"info/format/{env}": 0.5 for env in ENVS}
            line |= {"token_mult_prob_error": 1 + 1e-6 * step, "gen_kl_error": 1e-9 * (step - 1)}
            line |= {"step_seconds": 5.0, "wait_for_rollouts": 1.0, "train_seconds": 2.0}
            line |= {"wait_for_training": {1: 900.0, 20: 40.0}.get(step, 0.5)}
            line |= {"sync_pause": 0.1, "sync_transfer": 0.2, "sync_resume": 0.1}
            lines.append(line | {"grad_norm": math.nan if step == 7 else 1.0, "novel.key": 3})
        if step % 10 == 0:
            line = {"step": step, "validation_reward": reward, "validation_pass@4": reward}
            lines.append(line | {"validation_exact": reward / 2})
    return lines


def rollout(step: int | None, slot: int, i: int, evaluation: int | None = None) -> dict:
    line = {"step": step, "slot": slot, "evaluation": evaluation, "row": 3, "env": ENVS[i % 2]}
    line |= {"prompt": f"Be brief. Question {i}", "response": [f"answer {i}", "second turn"]}
    line |= {"reward": i / 3, "advantage": i - 1.5, "versions": [[0, 5], [1, 2]]}
    return line | {"finish_reason": "stop", "info": {"answer": i}}


def save_samples(path: Path) -> None:
    """Two groups of two samples: "hi" was given, and "yes\\n" sampled by versions 8, 8, 9, 9."""
    path.parent.mkdir()
    of_groups = {"slot": [18, 19], "version": [8, 8], "line": [4, 3]}
    floats = {"reward": [1, 0, 1, 1 / 3], "advantage": [1, -1, 0, 0]}
    floats |= {"engine_logp_T": [0.0, 0.0, -0.1, -0.5, -1.0, -2.0] * 4}
    floats |= {"logp_T": [0.0, 0.0, -0.1, -0.4, -1.0, np.nan] * 4}
    integers = {"group": [0, 0, 1, 1], "length": [6] * 4, "version_T": [-1, -1, 8, 8, 9, 9] * 4}
    integers |= {"tokens_T": [77, 78, 94, 74, 88, 100] * 4}
    flags = {"truncated": [False, True, False, False], "mask_T": ([False] * 2 + [True] * 4) * 4}
    arrays = {"env": np.array(ENVS).repeat(2)}
    arrays |= {"flaw_T": np.array([0] * 18 + [0, 0, 1, 1, 2, 2], np.int8)}
    arrays |= {name: np.array(values) for name, values in (of_groups | flags).items()}
    arrays |= {name: np.array(values, np.float32) for name, values in floats.items()}
    arrays |= {name: np.array(values, np.int32) for name, values in integers.items()}
    np.savez(path, **arrays)


def browser(test):
    """A test that opens a page."""
    return ABSENT(pytest.mark.slow(test))


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory) -> Path:
    """A run that is still going: the last line of each file is half written."""
    folder = tmp_path_factory.mktemp("runs") / "demo"
    folder.mkdir()
    save_tokenizer(folder / "model")
    config = {"model": str(folder / "model"), "steps": 100, "group_size": 2, "more": ATTACK}
    config |= {"policy": {"lr": 1e-3}, "advantage": {"penalties": {"tool_call": -5.0}}}
    config |= {"commit": "0123abc", "command_line": ["python", "grpo_async.py", ATTACK]}
    config |= {"versions": {"vllm": "1.2", "torch": "3.4"}, "diff": "+a\n-b\n"}
    (folder / "config.json").write_text(json.dumps(config))
    write_lines(folder / "metrics.jsonl", metric_lines(), '{"step": 31, "rew')
    row = {"by": "all", "key": "all", "tokens": 1000, "mean": 0.01, "max": 2.0, "k3": 1e-4}
    table = [row | {"kept": 0.5}, row | {"by": "env", "key": ATTACK, "kept": 1.0, "k3": math.nan}]
    places = [("lag", "0"), ("lag", "10"), ("lag", "2")]
    places += [("position", key) for key in ("1-3", "1024-4095", "16-63", "4-15")]
    table += [row | {"by": by, "key": key, "kept": 1.0} for by, key in places]
    mismatch = [{"step": step, "rows": table} for step in (1, 2)]
    write_lines(folder / "mismatch.jsonl", mismatch, '{"step": 3, "rows": [{"by"')
    every = [rollout(None, i, i, evaluation=0) for i in range(2)]
    every += [rollout(None, i, i, evaluation=10) | {"response": [ATTACK]} for i in range(2)]
    every += [rollout(step, slot, i) for step in (1, 10) for slot in (18, 19) for i in range(20)]
    for i, line in enumerate(every[4:44]):  # of step 1
        line["dataset"] = ("gsm8k", "aime")[i % 2]
    every[-1] |= {"env": ATTACK, "prompt": ATTACK, "response": [ATTACK], "info": {"x": ATTACK}}
    every += [rollout(step, 20, 0) for step in range(12, 36)]
    write_lines(folder / "rollouts.jsonl", every, '{"step": 11, "slot')
    save_samples(folder / "samples" / "step_000010.npz")
    (folder / "samples" / "step_000020.npz").write_bytes(b"PK half an archive")
    report.write(str(folder))
    return folder


def chromium(page: Path, *flags: str) -> str:
    """Opens a page; returns what was printed, after checking that the page had no complaint."""
    flags = ("--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", *flags)
    done = ran(CHROMIUM, *flags, "--virtual-time-budget=3000", page.as_uri())
    assert done.returncode == 0, done.stderr
    assert "INFO:CONSOLE" not in done.stderr
    return done.stdout


FRAME = """<iframe src="NAME" style="width: WIDTHpx; height: 844px; border: 0"></iframe><script>
onmessage = (event) => {
  const pre = document.createElement("pre");
  pre.id = "probe";
  pre.textContent = event.data;
  document.body.append(pre);
};
</script>"""


def evaluate(page: Path, script: str, width: int = 1400):
    """What a function body returns in the page, in a frame: a window is at least 500 wide."""
    probe = page.with_suffix(".probe.html")
    code = f"parent.postMessage(JSON.stringify((() => {{ {script} }})()), '*');"
    probe.write_text(page.read_text().replace("</html>", f"<script>{code}</script></html>"))
    frame = page.with_suffix(".frame.html")
    frame.write_text(FRAME.replace("NAME", probe.name).replace("WIDTH", str(width)))
    dom = chromium(frame, "--dump-dom")
    return json.loads(html.unescape(re.search(r'<pre id="probe">(.*?)</pre>', dom, re.S)[1]))


@pytest.fixture
def look(run_dir):
    """A function that evaluates a script in the page of the run."""
    return functools.partial(evaluate, run_dir / "report.html")


@browser
def test_curves_have_a_point_for_each_value(look):
    result = look("""
        const paths = [...document.querySelectorAll("#curves path[data-key]")];
        const bare = paths.filter((p) => p.getAttribute("opacity") === "1");
        return {
          points: Object.fromEntries(bare.map((p) => [p.dataset.key, +p.dataset.points])),
          faint: paths.length - bare.length,
          circles: document.querySelectorAll("#curves circle").length,
          options: [...document.querySelectorAll("#curves option")].map((o) => o.value),
          picked: document.querySelector("#curves select").value,
          alarm: document.querySelectorAll("#curves [stroke-dasharray]").length,
          legends: Object.fromEntries([...document.querySelectorAll("#curves figure")].map((f) =>
            [f.querySelector("svg").getAttribute("aria-label"),
             [...f.querySelectorAll(".legend span")].map((span) => span.textContent)])),
          tiles: document.querySelector(".tiles").textContent,
        };
    """)
    points = result["points"]
    assert points["reward"] == points["reward/math"] == points["reward/code"] == STEPS
    assert points["reward/math/gsm8k"] == points["info/format/code"] == STEPS
    assert points["validation_reward"] == points["validation_pass@4"] == 4
    assert points["validation_exact"] == 4 and points["mismatch at lag 0"] == 2
    assert points["grad_norm"] == STEPS - 1, "NaN is no point"
    assert points["gen_kl_error"] == STEPS - 1, "0 has no place on a log scale"
    phases = {"wait for rollouts", "train", "weight sync", "rest"}
    assert {key: points[key] for key in phases} == dict.fromkeys(phases, STEPS - 1)
    assert result["circles"] == 12 and result["alarm"] == 1
    assert result["faint"] == 5, "behind the three lines of cut off answers and the two of format"
    assert result["picked"] == "novel.key" and "lag_mean" in result["options"]
    assert not [name for name in result["options"] if name.startswith("reward/")]
    assert "30of 100" in result["tiles"] and "1at step 30" in result["tiles"]
    legends = result["legends"]
    assert legends["Reward"] == ["all", "code", "math", "aime", "gsm8k"]
    assert legends["Answers cut off"] == ["all", "aime", "gsm8k"], "one environment is the whole"
    assert legends["format"] == ["code", "math"]
    assert legends["Gradient norm"] == ["grad_norm"]
    assert legends["Policy lag"] == ["lag_mean"]


@browser
def test_the_start_of_a_run_does_not_flatten_its_waits(look):
    """Step 1 waited 900 s, step 20 40 s, every other one 1 s."""
    highest, text = look("""
        const plot = document.querySelector("#curves [aria-label=Waits]");
        const marks = [...plot.querySelectorAll("[text-anchor=end]")].map((t) => +t.textContent);
        return [Math.max(...marks), plot.parentElement.querySelector(".label").textContent];
    """)
    assert highest == 2
    assert "step 1, which contains the start, and values above 2 in 1 steps" in text


@browser
def test_hovering_shows_the_values(look):
    shown = look("""
        const shown = {};
        for (const plot of document.querySelectorAll("#curves svg")) {
          const box = plot.getBoundingClientRect();
          plot.dispatchEvent(new PointerEvent("pointermove", {clientX: box.right - 9}));
          shown[plot.getAttribute("aria-label")] = document.querySelector("#tip").innerText;
        }
        return shown;
    """)
    lines = ["step 30", "token_mult_prob_error", "1 + 3.0e-5"]
    assert shown["Probability mismatch"].split("\n") == lines
    phases = ["wait for rollouts", "1", "train", "2", "weight sync", "0.4", "rest", "1.6"]
    assert shown["Step time by phase"].split("\n")[1:] == phases


@browser
def test_the_mismatch_table_follows_its_slider(look):
    last, first, rows = look("""
        const slider = document.querySelector("#mismatch input");
        const shown = () => document.querySelector("#mismatch output").textContent;
        const rows = [...document.querySelectorAll("#mismatch tr")].slice(1);
        const last = shown();
        slider.value = 0;
        slider.dispatchEvent(new Event("input"));
        return [last, shown(), rows.map((row) => [...row.cells].map((c) => c.textContent))];
    """)
    assert last.startswith("step 2,") and first.startswith("step 1,")
    assert rows[0] == ["all", "all", "1,000", "0.01", "2", "1.00e-4", "50.00 %"]
    assert rows[1] == ["env", ATTACK, "1,000", "0.01", "2", "–", "100.00 %"]
    keys = ["0", "2", "10", "1-3", "4-15", "16-63", "1024-4095"]
    assert [key for _, key, *_ in rows[2:]] == keys
    assert [by for by, *_ in rows[2:]] == ["lag", "", "", "position", "", "", ""]


@browser
def test_the_top_says_how_the_run_is_and_what_started_it(look):
    health, verdict, settings = look("""return ["#health", "#health.wrong b", ".config"]
        .map((selector) => document.querySelector(selector).textContent);""")
    assert verdict == "Not healthy. "
    assert health.startswith("Not healthy. Steps whose gradient norm is not finite: 1. Right val")
    assert "from 0% (step 0) to 50% (step 30)." in health
    assert "commit 0123abc" in settings and "diff 2 lines, in config.json" in settings
    assert "versions vllm 1.2, torch 3.4" in settings
    assert f"command_line python grpo_async.py {ATTACK}" in settings


@browser
def test_a_validation_prompt_is_shown_with_its_first_and_last_answer(look):
    """Of the start that all prompts share, whole sentences are left out."""
    shown = look("""return [...document.querySelectorAll("#pairs .pair")].map((pair) =>
          [...pair.querySelectorAll("span, pre")].map((part) => part.textContent));""")
    for i, reward in enumerate(["0", "0.3333"]):
        said = f"reward {reward}, policy 0 (5 tokens), 1 (2 tokens)"
        answers = [said, f"answer {i}\n\nsecond turn", said, ATTACK]
        assert shown[i] == [f"prompt, row 3, {ENVS[i]}", f"Question {i}", *answers]
    assert len(shown) == 2


@browser
def test_rollouts_are_listed_filtered_and_opened(look):
    result = look("""
        const form = document.querySelector("#rollouts form"), fields = form.elements;
        const details = () => [...document.querySelectorAll("#list > details")];
        const found = (values) => {
          form.reset();
          for (const [name, value] of Object.entries(values)) fields[name].value = value;
          form.dispatchEvent(new Event("input"));
          return [details().length, form.querySelector("output").textContent];
        };
        const counts = [found({}), found({step: "10"}), found({step: "validation 0"}),
          found({env: "code"}), found({low: "1", high: "1.34"}), found({text: "ANSWER 7"}),
          found({dataset: "aime"})];
        found({});
        fields.next.click();
        const second = form.querySelector("output").textContent;
        found({text: "answer 7"});
        const one = details()[0];
        one.open = true;
        one.ontoggle();
        const unsaved = one.querySelector("button");
        const row = [...one.querySelectorAll("summary span")].map((cell) => cell.textContent);
        found({step: "10"});
        const group = details()[0];
        group.open = true;
        group.ontoggle();
        const folded = [group.firstChild.innerText, group.querySelectorAll("details").length];
        found({step: "10", low: "0.33", high: "0.34"});
        const saved = details().find((each) => each.textContent.startsWith("1019code0.3333"));
        saved.open = true;
        saved.ontoggle();
        saved.querySelector("button").click();
        const chosen = samples.sample.selectedOptions[0].textContent;
        return {counts, second, text: one.textContent, unsaved, row, chosen, folded};
    """)
    found = [(25, 108, 2), (2, 40, 1), (2, 2, 1), (6, 41, 1), (4, 8, 1), (4, 4, 1), (2, 20, 1)]
    counts = [[shown, f"{total} found, page 1 of {pages}"] for shown, total, pages in found]
    assert result["counts"] == counts
    assert result["second"] == "108 found, page 2 of 2"
    shown, members = result["folded"]
    assert shown.split()[:4] == ["10", "18", "math", "3.167"] and members == 20
    assert shown.endswith("20 answers, rewards 0 to 6.333")
    assert result["row"][6:] == ["Be brief. Question 7", "answer 7 second turn"]
    assert "Question 7" in result["text"] and "second turn" in result["text"]
    assert "0 (5 tokens), 1 (2 tokens)" in result["text"]
    assert result["unsaved"] is None, "no sample of that reward was saved"
    assert result["chosen"].startswith("slot 19, row 3, code: reward 0.3333,")


@browser
def test_tokens_carry_version_colour_and_explanation(look):
    result = look("""
        const section = document.querySelector("#samples");
        const {sample, colour} = section.querySelector("form").elements;
        const spans = () => [...section.querySelectorAll(".tokens span")];
        const colours = {};
        for (const option of colour.options) {
          colour.value = option.value;
          colour.onchange();
          colours[option.value] = spans().map((span) => span.dataset.color);
        }
        const tips = [0, 3, 5].map((i) => {
          spans()[i].dispatchEvent(new PointerEvent("pointermove", {bubbles: true}));
          return document.querySelector("#tip").innerText.replaceAll("\\n", " ");
        });
        return {
          colours, tips, samples: sample.options.length, note: section.textContent,
          text: spans().map((s) => s.textContent), versions: spans().map((s) => s.dataset.version),
          given: spans().map((span) => span.className),
          painted: spans().map((span) => getComputedStyle(span).backgroundColor),
        };
    """)
    assert result["text"] == ["h", "i", "y", "e", "s", "↵\n"]
    assert result["versions"] == ["-1", "-1", "8", "8", "9", "9"]
    assert result["given"] == ["given", "given", "", "", "", ""]
    none = ["none", "none"]
    assert result["colours"] == {
        "policy version": [*none, "c0 35", "c0 35", "c1 35", "c1 35"],
        "advantage": [*none, *["c0 35"] * 4],
        "probability mismatch": [*none, "c4 0", "c4 47", "c4 0", "none"],
        "engine probability": [*none, "c3 7", "c3 28", "c3 44", "c3 61"],
    }
    assert result["painted"][0] == "rgba(0, 0, 0, 0)" != result["painted"][3]
    given, changed, uncomputed = result["tips"]
    assert "not sampled" in given and "id 77" in given
    for words in ("policy version 8", "engine -0.5", "trainer -0.4", "ratio 1.105"):
        assert words in changed
    assert "trainer not computed" in uncomputed
    assert result["samples"] == 4
    assert "4 of the 4 samples of 1 steps" in result["note"]
    assert "2 steps are saved" in result["note"]


@browser
def test_flawed_tokens_have_the_advantage_of_their_penalty(look):
    """Only tool_call has a penalty, -5. A field that a fork deleted is no error."""
    result = look("""
        const flawed = tokens(data.samples.rows[3]).slice(2);
        const shown = flawed.map((t) => explain(t).filter(([name]) => name.startsWith("flaw")));
        const penalised = flawed.map((t) => t.advantage);
        delete config.advantage;
        const without = tokens(data.samples.rows[3]).slice(2).map((t) => t.advantage);
        return {shown, penalised, without, settings: document.querySelector(".config").textContent};
    """)
    assert result["penalised"] == [-5, -5, 0, 0] and result["without"] == [0, 0, 0, 0]
    label = "flaw of its message"
    assert result["shown"] == [[[label, "tool_call"]]] * 2 + [[[label, "thinking"]]] * 2
    assert "policy.lr 0.001" in result["settings"] and "loss" not in result["settings"]


@browser
def test_text_of_rollouts_cannot_run(run_dir, look):
    assert (run_dir / "report.html").read_text().count("</script>") == 2
    title, shown = look("""
        const [form, list] = ["form", "#list"].map((s) => document.querySelector("#rollouts " + s));
        form.elements.env.selectedIndex = form.elements.env.length - 1;
        form.oninput();
        const one = list.querySelector("details");
        one.open = true;
        one.ontoggle();
        return [document.title, [...one.querySelectorAll("pre")].map((p) => p.textContent)];
    """)
    assert title == "demo"
    assert shown[:2] == [ATTACK, ATTACK] and json.loads(shown[2]) == {"x": ATTACK}


@browser
@pytest.mark.parametrize("width", [390, 1400])
def test_nothing_is_wider_than_the_screen(look, width):
    """What is wider scrolls in a box of its own, and no text is smaller than 11 pixels."""
    script = """
        const grown = (e) => e.getBoundingClientRect().right > innerWidth;
        const boxed = (e) => e && (getComputedStyle(e).overflowX !== "visible" ||
          boxed(e.parentElement));
        const all = [...document.querySelectorAll("body *")];
        const wide = all.filter((e) => e.checkVisibility() && grown(e) && !boxed(e.parentElement));
        const text = document.querySelector("#curves svg text");
        const scale = text.ownerSVGElement.getBoundingClientRect().width / W;
        const sizes = all.filter((e) => !e.ownerSVGElement && e.checkVisibility())
          .map((e) => parseFloat(getComputedStyle(e).fontSize));
        return [innerWidth, document.documentElement.scrollWidth, wide.map((e) => e.outerHTML),
          Math.min(...sizes), parseFloat(getComputedStyle(text).fontSize) * scale];
        """
    inner, scrolled, wide, smallest, axis = look(script, width)
    assert inner == width and scrolled <= width and wide == []
    assert smallest >= 11 and axis >= 10.5


@browser
def test_runs_are_compared_curve_by_curve_and_setting_by_setting(run_dir, tmp_path):
    """Under short names; a metric that one of them lacks has one line."""
    other = tmp_path / "runs" / "other"
    shutil.copytree(run_dir, other)
    config = json.loads((other / "config.json").read_text())
    config["policy"]["lr"] = 5e-4
    (other / "config.json").write_text(json.dumps(config))
    lines = [line | {"only.here": 1} for line in metric_lines()[:20]]
    write_lines(other / "metrics.jsonl", lines)
    page = report.compare([str(run_dir), str(other)])
    assert page == run_dir / "compare.html"
    title, figures, differs, rest = evaluate(
        page,
        """
        const of = (figure) => [figure.querySelector("figcaption").firstChild.textContent,
          [...figure.querySelectorAll(".legend span")].map((span) => span.textContent)];
        return [document.title, [...document.querySelectorAll("figure")].map(of),
          document.querySelector(".config").textContent, document.body.innerText];""",
    )
    names = title.split(" and ")
    assert [name.rpartition(":")[2] for name in names] == ["demo", "other"]
    legends = dict(figures)
    assert legends["Reward"] == names and "Groups with equal rewards" not in legends
    assert "policy.lr 0.001 | 0.0005" in differs and "steps" not in differs
    assert re.search(r"reward, last [\d.]+ \| [\d.]+", differs) and "command_line" not in differs
    assert f"{names[1]}: Steps whose gradient norm is not finite: 1." in rest
    assert "Rollouts" not in rest and "Token by token" not in rest
    data = json.loads(re.search(r'id="data">(.*?)</script>', page.read_text(), re.S)[1])
    assert data["columns"][f"only.here/{names[1]}"].count(1) == 19
    for wrong in ([str(run_dir), str(run_dir)], [str(run_dir), str(tmp_path / "absent")]):
        with pytest.raises(InputError, match="expected the folder"):
            report.compare(wrong)


@browser
def test_light_and_dark(run_dir, tmp_path):
    from matplotlib.image import imread

    brightness = []
    for scheme in (1, 0):
        picture = tmp_path / f"{scheme}.png"
        flags = f"--blink-settings=preferredColorScheme={scheme}", "--window-size=1280,2400"
        chromium(run_dir / "report.html", f"--screenshot={picture}", *flags)
        brightness.append(float(imread(picture)[..., :3].mean()))
    assert brightness[0] > 0.85 and brightness[1] < 0.2


@browser
def test_an_empty_run_has_a_page(tmp_path):
    text = evaluate(report.write(str(tmp_path)), "return document.body.innerText;")
    assert "No metrics yet." in text and "Rollouts" not in text and "Token by token" not in text


@browser
def test_a_run_of_one_step_or_without_waits_has_charts(tmp_path):
    names = ("step_seconds", "wait_for_rollouts", "wait_for_training", "reward")
    for steps, charts in ((1, ["Reward"]), (3, ["Reward", "Step time by phase", "Waits"])):
        lines = [{"step": i + 1} | dict.fromkeys(names, 0.0) for i in range(steps)]
        write_lines(tmp_path / "metrics.jsonl", lines)
        script = """return [[...document.querySelectorAll("#curves svg")].map((plot) =>
          plot.getAttribute("aria-label")), document.querySelector("#curves").innerHTML];"""
        shown, drawn = evaluate(report.write(str(tmp_path)), script)
        assert shown == [*charts, "Any metric"]
        assert "NaN" not in drawn and "Infinity" not in drawn


@browser
def test_a_distillation_has_a_curve_for_each_teacher(tmp_path):
    measured = {"reverse_kl": 0.4, "reverse_kl/spells": 0.3, "reverse_kl/sorts": 0.5}
    measured |= {"teacher_wait/spells": 1.0, "teacher_wait/sorts": 2.0}
    write_lines(tmp_path / "metrics.jsonl", [{"step": step} | measured for step in (1, 2)])
    script = """return Object.fromEntries([...document.querySelectorAll("#curves figure")].map(
      (figure) => [figure.querySelector("svg").getAttribute("aria-label"),
        [...figure.querySelectorAll(".legend span")].map((span) => span.textContent)]));"""
    legends = evaluate(report.write(str(tmp_path)), script)
    assert legends["Reverse KL"] == ["all", "sorts", "spells"]
    assert legends["Wait for teachers"] == ["sorts", "spells"]


@browser
@pytest.mark.parametrize("other", [0.5, 0.75])
def test_right_answers_are_shown_once_where_they_are_the_reward(tmp_path, other):
    """For all environments, and nowhere else."""
    names = ("validation_reward", "validation_exact", "validation_exact/math")
    lines = [dict.fromkeys(names, 0.5) | {"step": 0, "validation_reward/math": other}]
    write_lines(tmp_path / "metrics.jsonl", [*lines, lines[0] | {"step": 1}])
    script = """return [[...document.querySelectorAll("#curves svg")].map((plot) =>
      plot.getAttribute("aria-label")), document.querySelector(".tiles").textContent,
      document.querySelector("#curves select").value];"""
    charts, tiles, picked = evaluate(report.write(str(tmp_path)), script)
    binary = other == 0.5
    exact, reward = "Validation, exactly right", "Validation reward"
    assert charts == [exact, *[reward] * (not binary), "Any metric"]
    assert "right answers" in tiles and ("validation reward" in tiles) != binary
    assert picked == "validation_exact", "no metric is left over"


def test_a_page_shows_whole_groups_of_all_the_run(tmp_path, monkeypatch):
    """Two groups of two each were written for 20 steps; there is room for ten groups."""
    monkeypatch.setitem(report.LIMITS, "rollouts", 20)
    places = itertools.product(range(1, 21), range(2), range(2))
    every = [rollout(step, 2 * step + group, i) for step, group, i in places]
    path = tmp_path / "rollouts.jsonl"
    write_lines(path, every, '{"step": 21, "slot')
    found = report.rollouts(path)
    assert found["total"] == 80 and found["pairs"] == []
    assert found == report.rollouts(path)
    rows = found["rows"]
    assert len(rows) == 20 and rows == sorted(rows, key=lambda row: (-row["step"], row["slot"]))
    assert [row["prompt"] for row in rows] == ["Be brief. Question 0", "Be brief. Question 1"] * 10
    slots = [row["slot"] for row in rows[::2]]
    assert slots[0] == 40 and slots[-1] == 3, "the first of the newest, the last of the oldest"
    steps = [row["step"] for row in rows[::2]]
    assert {new - old for new, old in zip(steps, steps[1:], strict=False)} <= {2, 3}
    monkeypatch.setitem(report.LIMITS, "characters", 2000)
    few = report.rollouts(path)["rows"]
    assert 2 <= len(few) < 20 and few[0]["step"] == 20 and few[-1]["step"] == 1


def test_pairs_are_of_the_same_prompt(tmp_path):
    """A group that was lost is written again, and a resumed run may have other validation rows."""
    every = [
        rollout(None, slot, slot, version) | {"response": [f"{version}, answer {i}"]}
        for version, slot, i in itertools.product((0, 5, 10), range(100), range(2))
    ]
    every = every[:-2] + [every[-1] | {"prompt": "another", "response": ["again"]}]
    write_lines(tmp_path / "rollouts.jsonl", [rollout(1, 0, 0), *every])
    found = report.rollouts(tmp_path / "rollouts.jsonl")["pairs"]
    assert [first["slot"] for first, _ in found] == [0, 14, 28, 42, 57, 71, 85]
    answers = {(first["response"][0], last["response"][0]) for first, last in found}
    assert answers == {("0, answer 0", "10, answer 0")}


def test_samples_are_of_several_steps(tmp_path, monkeypatch):
    save_samples(tmp_path / "samples" / "step_000010.npz")
    for step in (11, 12, 13):
        shutil.copy(tmp_path / "samples/step_000010.npz", tmp_path / f"samples/step_0000{step}.npz")
    paths = sorted((tmp_path / "samples").iterdir())
    monkeypatch.setitem(report.LIMITS, "samples_per_step", 3)
    monkeypatch.setitem(report.LIMITS, "samples", 6)
    found = report.samples(paths, str(tmp_path / "absent"))
    assert [(s["step"], s["of"]) for s in found["rows"]] == [(13, 4)] * 3 + [(10, 4)] * 3
    monkeypatch.setitem(report.LIMITS, "tokens", 24)
    found = report.samples(paths, str(tmp_path / "absent"))
    assert [s["step"] for s in found["rows"]] == [13, 13, 10, 10]
    assert found["text"] == {} and "cannot be loaded" in found["problem"]


def test_the_page_is_small_and_needs_no_network():
    template = (Path(report.__file__).parent / "runtime/reporting/report_page.html").read_text()
    assert len(template.encode()) < 60_000
    namespaces = {"http://www.w3.org/1999/xhtml", "http://www.w3.org/2000/svg"}
    assert set(re.findall(r"https?://[^\"']+", template)) == namespaces


def test_the_picture_of_a_run_that_is_still_going(run_dir, monkeypatch):
    """It has right validation answers where they are counted, and the mean reward beside them."""
    from matplotlib import pyplot

    monkeypatch.setattr(pyplot, "close", lambda figure: None)
    folder = run_dir.parent / "picture"
    folder.mkdir()
    drawn = []
    for left_out in ("none", "validation_exact"):
        lines = [line | {"mixed_version_samples": 0.0} for line in metric_lines()]
        kept = [{k: v for k, v in line.items() if k != left_out} for line in lines]
        write_lines(folder / "metrics.jsonl", kept, '{"step"')
        picture = report.draw(str(folder))
        assert picture == folder / "reward.png" and picture.stat().st_size > 5000
        curves = pyplot.gcf().axes[0].lines
        drawn.append({line.get_label(): list(line.get_ydata()) for line in curves})
    reward, validation = "training batch, mean reward", "validation, mean reward"
    exact = "validation, exactly right answers"
    assert list(drawn[0]) == [reward, validation, exact]
    at = [step / STEPS for step in (0, 10, 20, 30)]
    assert drawn[0][exact] == pytest.approx([value / 2 for value in at])
    assert list(drawn[1]) == [reward, validation]
    assert drawn[1][validation] == pytest.approx(at)
    same = {"step": 0, "validation_exact": 0.5, "validation_reward": 0.5}
    write_lines(folder / "metrics.jsonl", [same])
    report.draw(str(folder))
    assert [line.get_label() for line in pyplot.gcf().axes[0].lines] == [exact]


# --- odd lines ------------------------------------------------------------------------------------

ODD = ["5", "[]", "{}", '""', "null", "true", "NaN", "1e999", "-Infinity", "9" * 400, "9" * 5000]
ODD += ["-1", "1.5", '"x"', "[1, 2]", "[[]]", '{"step": 1}', "[" * 990 + "]" * 990, "[" * 99_999]
ODD += ['"\\ud800"', '"<script>"', "\x00", "1e99"]
TABLE = {"step": 1, "rows": [{"by": "lag", "key": "0", "tokens": 9, "mean": 0.1, "max": 1.0}]}


def spoiled(line: dict) -> list[str]:
    """The line, and each of its parts at any depth, replaced by each odd value; and left out."""

    def variants(value):
        yield "ODD"
        keys = {dict: list, list: lambda items: range(len(items))}.get(type(value), lambda _: ())
        for key in keys(value):
            for inner in variants(value[key]):
                copy = value.copy()
                copy[key] = inner
                yield copy
            if isinstance(value, dict):
                yield {k: v for k, v in value.items() if k != key}

    templates = [json.dumps(variant) for variant in variants(line)]
    return [template.replace('"ODD"', odd) for template in templates for odd in ODD]


def good_lines() -> dict[str, list[dict]]:
    """Ten steps of each file, and a validation."""
    rollouts = [rollout(step, step, 0) for step in range(1, 11)] + [rollout(None, 0, 0, 0)]
    return {"metrics": metric_lines()[:11], "mismatch": [TABLE], "rollouts": rollouts}


def written(folder: Path) -> dict:
    """The data of the page, which must be JSON for any parser."""
    text = re.search(r'id="data">(.*?)</script>', report.write(str(folder)).read_text(), re.S)[1]
    return json.loads(text, parse_constant=pytest.fail)


@pytest.mark.parametrize("name", ["metrics", "mismatch", "rollouts"])
def test_no_line_breaks_the_report(tmp_path, name):
    lines = good_lines()[name]
    for odd in spoiled(lines[-1])[::8]:
        write_lines(tmp_path / f"{name}.jsonl", lines, odd + "\n")
        written(tmp_path)


@pytest.fixture(scope="module")
def odd_run(tmp_path_factory) -> Path:
    """A run with all odd lines, some thousand, behind the good ones."""
    folder = tmp_path_factory.mktemp("runs") / "odd"
    folder.mkdir()
    for name, lines in good_lines().items():
        write_lines(folder / f"{name}.jsonl", lines, "\n".join(spoiled(lines[-1])))
    return folder


def test_all_odd_lines_together_leave_the_good_ones(odd_run):
    data = written(odd_run)
    assert len(data["rollouts"]["rows"]) >= 11 and data["mismatch"]
    assert data["columns"]["reward"].count(None) < len(data["columns"]["step"])
    assert report.draw(str(odd_run)).stat().st_size > 5000


@browser
def test_no_line_breaks_the_page(odd_run):
    text = evaluate(report.write(str(odd_run)), "return document.body.innerText;")
    assert "Rollouts" in text and "Trainer against engine" in text and "Reward" in text


@pytest.mark.parametrize("odd", ODD)
def test_a_config_that_is_none_has_a_page(tmp_path, odd):
    for config in (odd, f'{{"model": {odd}, "prompts_per_step": {odd}, "diff": {odd}}}'):
        (tmp_path / "config.json").write_text(config)
        write_lines(tmp_path / "metrics.jsonl", metric_lines())
        report.write(str(tmp_path))


def test_a_folder_that_is_absent_or_half_written(tmp_path):
    with pytest.raises(InputError, match="nowhere: expected the folder of a run"):
        report.write(str(tmp_path / "nowhere"))
    (tmp_path / "config.json").write_text('{"model": "/x')
    assert report.write(str(tmp_path)).is_file()
