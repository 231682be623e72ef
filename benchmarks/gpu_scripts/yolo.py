"""A YOLO loop with a GradScaler, accumulation and an average of the weights: WongKinYiu/yolov7, with a small model."""

from pathlib import Path

import numpy as np
import yaml
from _driving import run_script, write_images

MODEL = {
    "nc": 3,
    "depth_multiple": 1.0,
    "width_multiple": 1.0,
    "anchors": [[10, 13, 16, 30, 33, 23], [30, 61, 62, 45, 59, 119], [116, 90, 156, 198, 373, 326]],
    "backbone": [[-1, 1, "Conv", [8, 3, 8]], [-1, 1, "Conv", [8, 3, 2]], [-1, 1, "Conv", [16, 3, 2]]],
    "head": [[[0, 1, 2], 1, "IDetect", ["nc", "anchors"]]],
}


def main():
    np.trapz = np.trapezoid  # the name that NumPy had for it when the script was written
    random = np.random.default_rng(0)
    for part in ("train", "val"):
        write_images(f"data/{part}/images", 8, 64, suffix=".jpg")
        Path(f"data/{part}/labels").mkdir(parents=True)
        for number in range(8):
            places, sizes = random.uniform(0.3, 0.7, (4, 2)), random.uniform(0.1, 0.5, (4, 2))
            boxes = np.column_stack([random.integers(0, 3, 4), places, sizes])
            np.savetxt(f"data/{part}/labels/{number}.txt", boxes, "%d %.3f %.3f %.3f %.3f")
    Path("small.yaml").write_text(yaml.safe_dump(MODEL), encoding="utf-8")
    data = {"train": "data/train/images", "val": "data/val/images", "nc": 3, "names": ["a", "b", "c"]}
    Path("random.yaml").write_text(yaml.safe_dump(data), encoding="utf-8")
    run_script(
        "train.py",
        *("--weights", "", "--cfg", "small.yaml", "--data", "random.yaml", "--hyp", "data/hyp.scratch.p5.yaml"),
        *("--img-size", "64", "--batch-size", "2", "--workers", "0", "--epochs", "2", "--noautoanchor"),
        *("--device", "0"),
    )
