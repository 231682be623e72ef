"""Confirm the repros of reports/found over seeds and devices' autocast lists, and record what ampcheck says of each.

    python confirm.py FOLDER...

A repro gives `inputs(seed)`, `f(*inputs)`, `DTYPE`, `AUTOCAST`, `LIMIT`. Each is compared with float64 on the same inputs.
"""
import json, runpy, sys, warnings, contextlib, io, subprocess, time
from importlib.metadata import version
from pathlib import Path
import torch
from ampcheck import audit, emulate, Subject
warnings.simplefilter("ignore")
torch.set_num_threads(1)

def vec(o):
    if torch.is_tensor(o): return o.detach().double().reshape(-1)
    return torch.cat([vec(x) for x in o])

def error(got, exact):
    a, b = vec(got), vec(exact)
    if not torch.isfinite(b).all(): return "exact is not finite"
    if not torch.isfinite(a).all(): return "nonfinite"
    return float((a - b).norm() / b.norm().clamp_min(1e-300))

def to(args, dtype): return [a.to(dtype) if torch.is_tensor(a) and a.is_floating_point() else a for a in args]

class Call(torch.nn.Module):
    def __init__(self, f): super().__init__(); self.f = f
    def forward(self, *args): return self.f(*args)

def confirm(folder):
    ns = runpy.run_path(str(folder / "repro.py"), run_name="repro")
    f, inputs, dtype, auto = ns["f"], ns["inputs"], ns["DTYPE"], ns["AUTOCAST"]
    out = {"seeds": {}}
    for device in ("cpu", "cuda") if auto else ("none",):
        ctx = (lambda: contextlib.nullcontext()) if not auto else (lambda: torch.autocast("cpu", dtype=dtype)) if device == "cpu" else (lambda: emulate("cuda", dtype))
        errs, rounded, single = [], [], []
        for seed in range(5):
            try:
                with ctx(): args = inputs(seed); got = f(*args)
            except Exception as e:
                errs.append(f"{type(e).__name__}: {e}"[:120]); continue
            errs.append(error(got, f(*to(args, torch.float64))))
            single.append(error(f(*to(args, torch.float32)), f(*to(args, torch.float64))))
            rounded.append(error(f(*to(to(args, dtype), torch.float64)), f(*to(args, torch.float64))))
        out["seeds"][device] = {"error": errs, "rounding_of_inputs_alone": rounded, "float32": single}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runs = {}
        for device in ("cpu", "cuda") if auto else ("cpu",):
            try:
                with (torch.autocast("cpu", dtype=dtype) if auto and device == "cpu" else emulate("cuda", dtype) if auto else contextlib.nullcontext()):
                    args = inputs(0)
                args = tuple(a.detach() if torch.is_tensor(a) else a for a in args)
                run = audit((Call(f), args), autocast=True if auto else None, dtype=dtype, device=device, compile=False, name=folder.name)
                runs[device] = [x for x in run.to_json()["findings"] if x["verdict"] in ("fail", "warn")]
            except Exception as e:
                runs[device] = [{"check": "", "verdict": "raised", "message": f"{type(e).__name__}: {e}"[:300]}]
    out["findings"] = runs
    return out, ns

def repro(folder):
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed): runpy.run_path(str(folder / "repro.py"), run_name="__main__")
    except SystemExit as end: return int(end.code or 0), printed.getvalue()
    except Exception as e: return 2, f"{type(e).__name__}: {e}"
    return 0, printed.getvalue()

def main():
    for name in sys.argv[1:]:
        folder = Path(name); t = time.process_time()
        out, ns = confirm(folder)
        exit_code, printed = repro(folder)
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
        out = {"command": f"python benchmarks/found_confirm.py {folder.name}", "ampcheck": commit, "torch": torch.__version__, "package": f"{ns['PACKAGE']} {version(ns['PACKAGE'])}", "repro_exit": exit_code, "repro_prints": printed.strip().splitlines(), **out}
        def slim(x):
            return {k: v for k, v in x.items() if v not in ("", [], {}, None)}
        out["findings"] = {d: [slim(x) for x in fs] for d, fs in out["findings"].items()}
        (folder / "finding.json").write_text(json.dumps(out, indent=1) + "\n")
        print("==", folder.name, "exit", exit_code, printed.strip()[-200:])
        for d, s in out["seeds"].items(): print("   ", d, [e if isinstance(e, str) else f"{e:.2g}" for e in s["error"]], "rounding", [e if isinstance(e, str) else f"{e:.1g}" for e in s["rounding_of_inputs_alone"]][:2], "f32", [e if isinstance(e, str) else f"{e:.1g}" for e in s["float32"]][:2])
        for d, fs in out["findings"].items():
            print("    ampcheck", d, [(x["check"], x["verdict"], (x.get("code") or "")[:60], x.get("where", {}).get("phase", "") if isinstance(x.get("where"), dict) else "") for x in fs][:5] or "NOTHING", round(time.process_time() - t, 1), flush=True)
if __name__ == "__main__": main()
