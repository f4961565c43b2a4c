"""Runs one package's settings in its own process and environment; `rivals.py` starts it.

    worker.py JOB.json

The job names the package, the model, the kvfold formats, the folder with `passages.pt` and the dense logits, and the
context. Each line written is an event: {"step": 1}, or {"row": …}.
"""

import json
import sys
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from caches import Setting, package
from protocol import decode

from kvfold.evaluate import FidelityMeter

sys.path.append(str(Path(__file__).parents[2]))  # models.py
import models


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(job["threads"])
    events = sys.stdout

    def send(**event: Any) -> None:
        print(json.dumps(event), file=events, flush=True)

    with redirect_stdout(sys.stderr):  # packages print, too
        model, _ = models.load(job["model"])
        for setting in package(job["package"], job["formats"]).settings:
            about = {"package": job["package"], "name": setting.name, "nominal": setting.nominal}
            try:
                send(row=about | measure(model, setting, job, lambda: send(step=1)))
            except Exception as error:  # a rival that breaks is a result
                message = next(iter(str(error).splitlines()), "")
                send(row=about | {"error": f"{type(error).__name__}: {message}"})


def measure(model: Any, setting: Setting, job: dict[str, Any], progress: Any) -> dict[str, Any]:
    """Figures of one setting over all passages: fidelity over all of their steps, the mean of bytes and seconds."""
    folder = Path(job["folder"])
    passages = torch.load(folder / "passages.pt")
    meter, dense_meter = FidelityMeter(), FidelityMeter()
    held, at_best, seconds = [], [], []
    for i, ids in enumerate(passages):
        subject = setting.make(model)
        logits, per_step = decode(model, subject.cache, ids, job["context"], progress)
        file = folder / f"dense{i}.pt"
        if job["package"] == "dense":
            torch.save(logits, file)
        dense, targets = torch.load(file), ids[0, job["context"] + 1 :]
        meter.add(logits, dense, targets)
        dense_meter.add(dense, dense, targets)
        held.append(subject.held())
        at_best.append(subject.at_best() if subject.at_best else subject.held(dense_width=2))
        seconds.append(per_step)
    result, reference = asdict(meter.result()), dense_meter.result()
    del result["seconds"]
    return result | {
        "ppl_dense": reference.ppl,
        "delta_ppl": result["ppl"] - reference.ppl,
        "held_bytes": round(sum(held) / len(held)),
        "at_best_bytes": round(sum(at_best) / len(at_best)),
        "seconds_per_step": sum(seconds) / len(seconds),
    }


if __name__ == "__main__":
    main()
