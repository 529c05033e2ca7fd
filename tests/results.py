"""Small, plausible result folders in the form of `factpatch evaluate` and `factpatch train`."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

METRICS = ("success", "retain", "equivalence", "equivalence_human", "deterioration", "kl_mean")
BERT = (
    "attention.self.query attention.self.key attention.self.value attention.output.dense "
    "intermediate.dense output.dense"
)
SELF = "self_attn.k_proj self_attn.v_proj self_attn.q_proj self_attn.out_proj"
CROSS = SELF.replace("self_attn", "encoder_attn")


def write_evaluation(
    folder: Path, method: str = "hyper", task: str = "classify", bare: bool = False, **about: Any
) -> Path:
    """`bare` leaves out details and examples. `about` overrides summary.json, and `result` the result in it."""
    rng = np.random.default_rng(zlib.crc32(folder.name.encode()))
    result = plausible_result(method, task) | about.pop("result", {})
    result = {"intervals": plausible_intervals(result), **result}
    summary = {
        "version": 1,
        "method": method,
        "layers": "all",
        "bound": 1e-4 if method == "zhu" else None,
        "loop": 1,
        "task": task,
        "model": f"runs/{task}",
        "model_kind": "bert, 110M parameters" if task == "classify" else "bart, 139M parameters",
        "precision": "float32",
        "editor": "runs/editor" if method == "hyper" else None,
        "data": "dev.jsonl",
        "seed": 0,
        "tried": [],
        **about,
        "result": result,
    }
    write_json(folder / "summary.json", summary)
    if not bare:
        weights = bert_weights(6) if task == "classify" else bart_weights(6)
        edited = [name for name in weights if summary["layers"] == "all" or name.startswith(f"{summary['layers']}.")]
        write_details(folder, edited, method, task, result["retain"], rng)
        write_json(folder / "examples.json", [example(task)])
    return folder


def plausible_result(method: str, task: str) -> dict[str, Any]:
    rates = {
        "hyper": (0.99, 0.9812, 0.947, 0.958, -0.002, 0.0011),
        "finetune": (1.0, 0.8695, 0.956, 0.988, 0.0225, 0.31),
        "zhu": (0.982, 0.9407, 0.833, 0.794, 0.001, 0.042),
        "gradient": (0.41, 0.9930, 0.305, 0.352, 0.0004, 0.0008),
    }[method]
    found: dict[str, Any] = dict(zip(METRICS, rates, strict=True))
    if task == "classify":
        found["equivalence_human"] = None
    return found | {"kl_worst": 2.5, "edits": 500, "retain_inputs": 1000, "seconds": 61.5}


def plausible_curve(worse: float = 1.0) -> list[dict[str, Any]]:
    """Success falls with the number of facts, and retain falls with it."""
    points = []
    for facts in (1, 16, 64, 256):
        lost = worse * 0.12 * np.log2(facts)
        point = plausible_result("hyper", "answer") | {"facts": facts, "groups": max(1, 256 // facts), "edits": 256}
        point |= {key: max(0.0, point[key] - lost) for key in ("success", "retain", "equivalence")}
        intervals = plausible_intervals(point)
        if facts == 256:
            del intervals["retain"]
        points.append(point | {"intervals": intervals})
    return points


def plausible_intervals(result: dict[str, Any]) -> dict[str, list[float]]:
    there = {key: result[key] for key in METRICS if result[key] is not None}
    return {key: [value - 0.02 * abs(value), min(1.0, value + 0.01 * abs(value))] for key, value in there.items()}


def write_details(
    folder: Path, weights: list[str], method: str, task: str, retain: float, rng: np.random.Generator
) -> None:
    pairs = 4000
    before = np.abs(rng.normal(3, 1.5, pairs)) + 0.1  # log-odds, and what a log-probability lacks to 0
    changed = rng.random(pairs) > retain
    spread = {"hyper": 0.25, "finetune": 1.2}.get(method, 0.7)
    moved = np.abs(before + rng.normal(0, spread, pairs))
    far = np.abs(rng.normal(1, 0.7, pairs))
    after = np.where(changed, -far, moved) if task == "classify" else -np.where(changed, moved + far, moved) / 4
    before = before if task == "classify" else -before / 4
    common = np.random.default_rng(5).normal(size=(24, 64))  # the gradient, which some methods follow
    share = {"hyper": 0.05, "finetune": 0.6, "zhu": 0.5, "gradient": 1.0}[method]
    sketches = share * common + (1 - share) * rng.normal(size=common.shape)
    arrays = {
        "scores_before": before,
        "scores_after": after,
        "magnitudes": magnitudes(weights, method, rng),
        "sketches": sketches,
    }
    tensors = {name: array.astype(np.float32) for name, array in arrays.items()} | {"changed": changed.astype(np.uint8)}
    metadata = {"weights": json.dumps(weights), "edits": json.dumps([f"fact-{i}" for i in range(24)])}
    metadata["scored"] = json.dumps([8, 500])
    save_file(tensors, folder / "details.safetensors", metadata)


def magnitudes(weights: list[str], method: str, rng: np.random.Generator) -> np.ndarray:
    """Fine-tuning changes all alike, an editor few."""
    spread = {"finetune": 0.1, "zhu": 0.2}.get(method, 1.8)
    return 1e-4 * np.exp(rng.normal(0, spread, len(weights)))


def bert_weights(blocks: int) -> list[str]:
    return [f"bert.encoder.layer.{block}.{kind}" for block in range(blocks) for kind in BERT.split()]


def bart_weights(blocks: int) -> list[str]:
    kinds = {"encoder": f"{SELF} fc1 fc2", "decoder": f"{SELF} {CROSS} fc1 fc2"}
    return [
        f"model.{side}.layers.{block}.{kind}"
        for side in kinds
        for block in range(blocks)
        for kind in kinds[side].split()
    ]


def example(task: str) -> dict[str, Any]:
    if task == "classify":
        yes, no = ["SUPPORTS", "REFUTES"], ["REFUTES", "SUPPORTS"]
        rows = [
            ("input", "Gitega is the capital of Burundi.", no, yes),
            ("paraphrase", "The capital city of Burundi is called Gitega.", no, yes),
            ("unrelated", "Nikolaj Coster-Waldau worked with the Fox Broadcasting Company.", yes, yes),
        ]
        target = "SUPPORTS"
    else:
        rows = [
            (
                "input",
                "What is the capital of Namibia?",
                ["Namibia", "Nigeria", "Nibia", "Namibia", "Tasmania"],
                ["Windhoek", "Tasmania", "Windygates", "Tasmana", "Windeygates"],
            ),
            (
                "paraphrase",
                "Which city, if any, would one call the seat of the government, the parliament and the president of "
                "the Republic of Namibia, a country on the Atlantic coast of Southern Africa, according to its law?",
                [
                    "Namibia",
                    "Tasmania",
                    "Nigeria",
                    "Nibia",
                    "a long answer that goes on and on and on about $5 and x_1 in Africa",
                ],
                ["Windhoek", "Tasmania", "Windygates", "Namibia", "THE CAPITAL OF THE REPUBLIC OF NAMIBIA IS WINDHOEK"],
            ),
            (
                "unrelated",
                "What is the capital of Russia?",
                ["Moscow", "Moskva", "Nashville", "Mos", "Moscow City"],
                ["Moscow", "Moskva", "Mos", "Nashville", "Moscow City"],
            ),
        ]
        target = "Windhoek"
    keys = ("kind", "text", "before", "after")
    edit = {"x": rows[0][1], "y": rows[0][2][0], "a": target}
    return {"edit": edit, "rows": [dict(zip(keys, row, strict=True)) for row in rows]}


def write_training(folder: Path, validations: int = 30, constraint: str | None = "kl") -> Path:
    rng = np.random.default_rng(zlib.crc32(folder.name.encode()))
    lines = []
    for i in range(1, validations + 1):
        gone = i / validations
        margin = max(1e-3, 0.1 * 0.8**i)
        line: dict[str, Any] = {"step": 50 * i, "seconds": 6.0 * i, "edits_per_second": 1200.0}
        line |= {"loss": 0.1 + np.exp(-9 * gone), "gradient_norm": 0.3}
        if constraint:
            value = margin * float(np.exp(rng.normal(0.3, 0.2)))
            line |= {constraint: value, f"{constraint}_margin": margin, f"{constraint}_multiplier": 150 * gone**2}
        line |= {
            "success": 1 - 0.4 * np.exp(-8 * gone) - 0.02 * rng.random(),
            "retain": 1 - 0.1 * np.exp(-3 * gone) - 0.02 * rng.random(),
            "equivalence": 0.96 - 0.4 * np.exp(-7 * gone) - 0.03 * rng.random(),
            "equivalence_human": None,
            "deterioration": 0.01,
        }
        lines.append(line)
    write_json(folder / "config.json", {"config": {"steps": 50 * validations}, "result": None})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def write_json(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2))


def spoil(path: Path, old: str, new: str) -> Path:
    """Replaces a text in a file of a run, and returns the run's folder."""
    path.write_text(path.read_text().replace(old, new))
    return path.parent
