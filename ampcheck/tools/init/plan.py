"""Plan of the files that `ampcheck init` writes, tried out in a copy of the repository."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from ampcheck.core.environment import installed
from ampcheck.core.errors import UsageError
from ampcheck.core.text import listed
from ampcheck.tools.init import pyproject
from ampcheck.tools.init.candidates import candidates, unimportable
from ampcheck.tools.init.files import Planned, require_writable
from ampcheck.tools.init.render import Contents, render_tests, render_workflow
from ampcheck.tools.init.repository import Repository, read_repository
from ampcheck.tools.init.sandbox import ENOUGH, Process, Tried, copied, import_paths, try_all
from ampcheck.tools.init.scripts import TrainingScript

TESTS = "tests/test_amp.py"
LOCK = "tests/ampcheck.lock.json"
WORKFLOW = ".github/workflows/ampcheck.yml"

_FROM = "ampcheck @ git+https://github.com/ampcheck/ampcheck"
"""Requirement that the workflow installs."""

_SCRIPTS = 2
"""Training scripts that are tried until one runs."""


@dataclass
class Draft:
    """Changes that `ampcheck init` would make.

    seen: what the repository holds, a line each. files: to be written, in order. left: files that stay as they are,
    with the reason. notes: what is not covered, and how to cover it. unfinished: the user is to fill in arguments.
    """

    folder: Path
    seen: tuple[str, ...]
    files: list[Planned] = field(default_factory=list)
    left: list[tuple[Path, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unfinished: bool = False


def make_draft(folder: Path, show: Callable[[str], None] = lambda stage: None) -> Draft:
    """Read a repository, try its models in a copy, and draft the files.

    show: called with each step. Raises `UsageError` for a folder that is missing or cannot be written, and for a
    pyproject.toml that cannot be read.
    """
    if not folder.is_dir():
        raise UsageError(f"ampcheck init needs a folder; {folder} is none")
    folder = folder.resolve()
    before = pyproject.read_pyproject(folder)
    if before is not None and not pyproject.has_targets(folder):
        pyproject.with_targets(before, {TESTS: ""})  # one that cannot be extended is refused before anything runs
    show("reading the repository")
    repository = read_repository(folder)
    for path in (
        folder / TESTS,
        folder / pyproject.NAME,
        *([] if repository.other_ci else [repository.top / WORKFLOW]),
    ):
        require_writable(path)
    draft, tests, lock, targets = Draft(folder, _seen(repository)), Contents(), "", dict[str, str]()
    if (folder / TESTS).exists():
        draft.left.append((folder / TESTS, "it exists; init tries no models beside it"))
    else:
        tests, lock, reasons = _tried(repository, show)
        draft.files.append(Planned(folder / TESTS, render_tests(tests), _what(tests)))
        draft.notes += _notes(repository, reasons)
        targets = _targets(tests)
    if lock:
        what = f"the policy lock: which ops of {listed(tests.locked)} autocast casts, and to what"
        draft.files.append(Planned(folder / LOCK, lock, what))
    elif (folder / LOCK).exists():
        draft.left.append((folder / LOCK, "it exists; `ampcheck policy lock TARGET` adds to it"))
    else:
        why = "no model has a test of it" if tests.models else "no model ran"
        target = next(iter(targets), "TARGET")
        draft.notes.append(f"no policy lock was written, as {why}: `ampcheck policy lock {target}` writes it")
    path = folder / pyproject.NAME
    if not targets:
        draft.left.append((path, "no targets are added beside tests that exist"))
    elif before is not None and pyproject.has_targets(folder):
        draft.left.append((path, f"[tool.ampcheck] has targets; new ones would be {listed(targets)}"))
    else:
        what = f"[tool.ampcheck] with the targets {listed(targets)}"
        draft.files.append(Planned(path, pyproject.with_targets(before, targets), what, before))
    _plan_workflow(draft, repository, tests)
    draft.unfinished = bool(targets) and not tests.models and not tests.script_runs
    return draft


def _plan_workflow(draft: Draft, repository: Repository, tests: Contents) -> None:
    folder, workflow = repository.folder, repository.top / WORKFLOW
    if repository.other_ci:
        commands = "`ampcheck audit` and `pytest tests/test_amp.py --ampcheck`"
        draft.left.append((workflow, f"the repository has {repository.other_ci}: run {commands} there"))
    elif workflow.exists():
        draft.left.append((workflow, "it exists"))
    else:
        if not (torch := installed("torch")):
            raise UsageError("ampcheck init runs the models, which needs torch; install it first")
        timed = bool(tests.models) and not tests.models[0].heavy  # else test_amp.py has no speed test
        text = render_workflow(
            folder="" if folder == repository.top else folder.relative_to(repository.top).as_posix(),
            install=_install(folder),
            torch=".".join(torch.split(".")[:2]),
            target=f"{TESTS}:{tests.models[0].candidate.name}" if timed else "",
        )
        speed = "; speed of pull requests and history" if timed else ""
        what = f"GitHub workflow: tests and audit on two PyTorch releases, job summary{speed}"
        draft.files.append(Planned(workflow, text, what))


def _tried(repository: Repository, show: Callable[[str], None]) -> tuple[Contents, str, list[str]]:
    """The tests whose factories ran, the text of their lock, and the reasons of what did not run or was left."""
    wanted = candidates(repository)
    with copied(repository.folder) as copy, Process(copy) as process:
        tried = try_all(copy, wanted, process, show)
        ran = [each for each in tried if each.attempt is not None]
        models = [each for each in ran if not each.heavy][:ENOUGH] or ran[:ENOUGH]
        failed = [each for each in tried if each.attempt is None]
        cuda = any(script.cuda for script in repository.scripts)
        tests = Contents(models, failed[0] if failed and not models else None, cuda=cuda)
        tests = replace(tests, paths=_paths(repository, models or failed[:1], None))
        locked, lock, unlocked = _locked(copy, tests, process, show)
        tests, untrained = _with_script(repository, copy, tests, process, show)
    reasons = [f"{each.candidate.title} did not run: {each.error}" for each in failed if each is not tests.unfinished]
    reached = {each.candidate.title for each in tried}
    if models and (others := [each.title for each in wanted if each.title not in reached]):
        reasons.append(f"not tried, as {len(models)} models have tests: {listed(others)}")
    rest = "is heavy, by its weights and the FLOPs of a pass: {} is left to `ampcheck audit`"
    what = {True: "compiled code", False: "all of it"}
    reasons += [f"{each.candidate.title} {rest.format(what[each in models])}" for each in ran if each.heavy]
    return replace(tests, locked=locked), lock, [*reasons, *unlocked, *untrained]


def _paths(repository: Repository, chosen: Sequence[Tried], script: TrainingScript | None) -> list[str]:
    """The folders that the tests need on `sys.path`."""
    imports = {root: set[str]() for root in dict.fromkeys(each.candidate.root for each in chosen)}
    for each in chosen:
        lines = each.attempt.imports if each.attempt is not None else each.candidate.imports
        imports[each.candidate.root].update(line.split()[1].partition(".")[0] for line in lines)
    if script is not None:
        imports.setdefault(script.source.root, set()).add(script.source.module.partition(".")[0])
        used = {origin.partition(".")[0] for origin in script.source.names.values()}
        for source in repository.sources:
            if (top := source.module.partition(".")[0]) in used:
                imports.setdefault(source.root, set()).add(top)
    own = {source.module.partition(".")[0] for source in repository.sources}
    return import_paths(repository.folder, {root: names & own for root, names in imports.items()})


def _locked(
    copy: Path, tests: Contents, process: Process, show: Callable[[str], None]
) -> tuple[list[str], str, list[str]]:
    """The factories whose policy could be locked, the text of their lock in the copy, and why others could not be."""
    if (copy / LOCK).exists():
        return [], "", []
    _write_tests(copy, tests)
    reasons = dict[str, str]()
    for name in (each.candidate.name for each in tests.models):
        show(f"locking the autocast policy of {name}")
        reasons[name] = process.why_not("lock", target=f"{TESTS}:{name}")
    names = [name for name, reason in reasons.items() if not reason]
    left = [f"the policy of {name} was not locked: {reason}" for name, reason in reasons.items() if reason]
    return names, (copy / LOCK).read_text(encoding="utf-8") if names else "", left


def _write_tests(copy: Path, tests: Contents) -> None:
    path = copy / TESTS
    path.parent.mkdir(exist_ok=True)
    path.write_text(render_tests(tests), encoding="utf-8")


def _with_script(
    repository: Repository, copy: Path, tests: Contents, process: Process, show: Callable[[str], None]
) -> tuple[Contents, list[str]]:
    """The tests with the first training script of which two steps run in the copy, else with the first one as it is to
    be filled in; and why the others were left."""

    def order(script: TrainingScript) -> tuple[bool, bool]:
        return script.needs != "", not Path(script.source.path).name.startswith("train")

    scripts = sorted(repository.scripts, key=order)
    models = tests.models or ([tests.unfinished] if tests.unfinished is not None else [])
    reasons = dict[str, str]()
    chosen: Contents | None = None
    for script in [each for each in scripts if not each.needs][:_SCRIPTS]:
        trains = replace(tests, script=script, script_runs=True, paths=_paths(repository, models, script))
        _write_tests(copy, trains)
        show(f"training two steps of {script.title} in a copy")
        target = script.title if script.is_target else f"{TESTS}:training"
        if not (reason := process.why_not("rehearse", target=target, device="cuda" if script.cuda else "")):
            chosen = trains
            break
        reasons[script.title] = reason
    if chosen is None and scripts:
        first = replace(scripts[0], needs=scripts[0].needs or f"what it lacks ({reasons[scripts[0].title]})")
        chosen = replace(tests, script=first, script_runs=False, paths=_paths(repository, models, first))
    left = [f"{title} did not train: {reason}" for title, reason in reasons.items()]
    own = chosen.script.title if chosen is not None and chosen.script is not None else ""
    others = [each for each in scripts if each.title != own and each.title not in reasons]
    if others:
        named = listed([f"{each.title} (which needs {each.needs})" if each.needs else each.title for each in others], 3)
        left.append(f"one training script has a test; no test has {named}")
    return chosen or tests, left


def _targets(tests: Contents) -> dict[str, str]:
    """The targets, each with CUDA where the scripts ask for it, which a machine without it emulates, else with ""."""
    script, on_cuda = tests.script, "cuda" if tests.cuda else ""
    models = [*tests.models, *([tests.unfinished] if tests.unfinished is not None else [])]
    targets = {f"{TESTS}:{each.candidate.name}": on_cuda for each in models}
    if script is None:
        return targets or {f"{TESTS}:model": on_cuda}
    if tests.script_runs or not targets:
        trains = script.title if tests.script_runs and script.is_target else f"{TESTS}:training"
        targets[trains] = "cuda" if script.cuda else ""
    return targets


def _what(tests: Contents) -> str:
    parts = [f"tests of {listed([each.candidate.title for each in tests.models])}"] if tests.models else []
    if tests.unfinished is not None:
        parts.append(f"tests of {tests.unfinished.candidate.title}, skipped until you fill in its arguments")
    if not parts and tests.script is None:
        parts.append("tests, skipped until you fill in a model")
    if tests.script is not None:
        skipped = "" if tests.script_runs else ", skipped until you fill in what it needs"
        data = " on random images" if tests.script_runs and tests.script.datasets else ""
        parts.append(f"a test of {tests.script.title}{data}{skipped}")
    return "; ".join(parts)


def _seen(repository: Repository) -> tuple[str, ...]:
    models = [model.name for model in repository.models]
    scripts = [script.source.path for script in repository.scripts]
    return (
        f"{len(repository.sources):,} Python files, {len(models):,} model classes: {listed(models) or 'none'}",
        f"training scripts: {listed(scripts) or 'none'}",
        f"tests: {len(repository.tests):,} files",
    )


def _notes(repository: Repository, reasons: Sequence[str]) -> list[str]:
    notes = list(reasons)
    if repository.unnameable:
        files = listed(repository.unnameable, 3)
        notes.append(f"no import statement can name {files}: rename to letters, digits and _ to have it tried")
    for path, names in unimportable(repository).items():
        notes.append(f"{names} of {path} cannot be imported without training: move the loop into a function")
    return notes


def _install(folder: Path) -> list[str]:
    """The shell lines that install the project and ampcheck."""
    lines = [f'pip install "{_FROM}"']
    if (folder / "requirements.txt").is_file():
        lines.insert(0, "pip install -r requirements.txt")
    builds = (folder / "setup.py").is_file() or (folder / "setup.cfg").is_file()
    with suppress(OSError):
        text = (folder / pyproject.NAME).read_text(encoding="utf-8")
        builds = builds or re.search(r"^\[(project|build-system|tool\.poetry)\]", text, re.MULTILINE) is not None
    if builds:
        lines.insert(0, "pip install -e .")
    return lines if len(lines) > 1 else ["# add the packages that the models import", *lines]
