"""What `ampcheck init` would write, tried out in a copy of the repository."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from ampcheck.autocast.policy import release_of
from ampcheck.core.environment import installed
from ampcheck.core.errors import UsageError
from ampcheck.core.text import listed
from ampcheck.setup import pyproject
from ampcheck.setup.candidates import candidates, unimportable
from ampcheck.setup.files import Planned, require_writable
from ampcheck.setup.render import Contents, render_tests, render_workflow
from ampcheck.setup.repository import Repository, TrainingScript, read_repository
from ampcheck.setup.sandbox import Tried, copied, import_paths, run_command, try_all

TESTS = "tests/test_amp.py"
LOCK = "tests/ampcheck.lock.json"
WORKFLOW = ".github/workflows/ampcheck.yml"

_FROM = "ampcheck @ git+https://github.com/ampcheck/ampcheck"
"""What the workflow installs."""

_SECONDS = 300.0
"""For a lock, and for the first steps of a training script; a busy machine needs minutes for what takes seconds."""


@dataclass
class Plan:
    """What would be done.

    seen: what the repository holds, a line each. files: to be written, in order. left: files that stay as they are,
    with the reason. notes: what is not covered, and how to cover it. unfinished: the user is to fill in arguments.
    """

    folder: Path
    seen: tuple[str, ...]
    files: list[Planned] = field(default_factory=list)
    left: list[tuple[Path, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unfinished: bool = False

    def add(self, path: Path, text: str, what: str) -> None:
        """Plan a new file; one that exists stays."""
        if path.exists():
            self.left.append((path, "it exists"))
        else:
            self.files.append(Planned(path, text, what))


def make_plan(folder: Path, show: Callable[[str], None] = lambda stage: None) -> Plan:
    """Read a repository, try its models in a copy, and draft the files.

    show: called with each stage. Raises `UsageError` for a folder that is missing or cannot be written, and for a
    pyproject.toml that cannot be read.
    """
    if not folder.is_dir():
        raise UsageError(f"ampcheck init needs a folder; {folder} is none")
    folder = folder.resolve()
    before = pyproject.read_pyproject(folder)
    if before is not None and not pyproject.has_targets(folder):
        pyproject.with_targets(before, [TESTS])  # one that cannot be extended is refused before anything runs
    show("reading the repository")
    repository = read_repository(folder)
    workflow = repository.top / WORKFLOW
    for path in (folder / TESTS, folder / pyproject.NAME, *([] if repository.other_ci else [workflow])):
        require_writable(path)
    plan, tests, lock = Plan(folder, _seen(repository)), Contents(), ""
    if (folder / TESTS).exists():
        plan.left.append((folder / TESTS, "it exists; init tries no models beside it"))
        targets: list[str] = []
    else:
        tests, lock, failed = _tried(repository, show)
        plan.files.append(Planned(folder / TESTS, render_tests(tests), _what(tests)))
        plan.notes += _notes(repository, tests, failed)
        targets = _targets(tests)
    if lock:
        what = f"the policy lock: which ops of {listed(tests.locked)} autocast casts, and to what"
        plan.files.append(Planned(folder / LOCK, lock, what))
    elif (folder / LOCK).exists():
        plan.left.append((folder / LOCK, "it exists; `ampcheck policy lock TARGET` adds to it"))
    else:
        why = "autocast could not be followed in any model" if tests.models else "no model ran"
        target = targets[0] if targets else "TARGET"
        plan.notes.append(f"no policy lock was written, as {why}: `ampcheck policy lock {target}` writes it")
    _plan_settings(plan, folder, before, targets)
    if repository.other_ci:
        commands = "`ampcheck audit` and `pytest tests/test_amp.py --ampcheck`"
        plan.left.append((workflow, f"the repository has {repository.other_ci}: run {commands} there"))
    else:
        text = render_workflow(
            folder="" if folder == repository.top else folder.relative_to(repository.top).as_posix(),
            install=_install(folder),
            torch=_torch_release(),
            target=f"{TESTS}:{tests.models[0].candidate.name}" if tests.models else "",
        )
        speed = "; speed of pull requests and history" if tests.models else ""
        plan.add(workflow, text, f"GitHub workflow: tests and audit on two PyTorch releases, job summary{speed}")
    plan.unfinished = bool(targets) and not tests.models and not tests.script_runs
    return plan


def _tried(repository: Repository, show: Callable[[str], None]) -> tuple[Contents, str, list[Tried]]:
    """The tests whose factories ran, the text of their lock, and the candidates that did not run."""
    wanted = candidates(repository)
    with copied(repository.folder) as copy:
        if wanted:
            show(f"trying {listed([each.title for each in wanted if each.attempts] or ['no model'], 3)} in a copy")
        tried = try_all(copy, wanted)
        models = [each for each in tried if each.attempt is not None]
        failed = [each for each in tried if each.attempt is None]
        script, runs = _script(repository, copy, show)
        paths = _paths(repository, models or failed[:1], script)
        tests = Contents(models, failed[0] if failed and not models else None, script, runs, paths)
        locked, lock = _locked(copy, tests, show)
    return replace(tests, locked=locked), lock, failed


def _paths(repository: Repository, chosen: Sequence[Tried], script: TrainingScript | None) -> list[str]:
    """The folders that the tests need on `sys.path`."""
    imports = {root: set[str]() for root in dict.fromkeys(each.candidate.root for each in chosen)}
    for each in chosen:
        lines = each.attempt.imports if each.attempt is not None else each.candidate.imports
        imports[each.candidate.root].update(line.split()[1].partition(".")[0] for line in lines)
    if script is not None:
        imports.setdefault(script.source.root, set()).add(script.source.module.partition(".")[0])
    own = {source.module.partition(".")[0] for source in repository.sources}
    return import_paths(repository.folder, {root: names & own for root, names in imports.items()})


def _locked(copy: Path, tests: Contents, show: Callable[[str], None]) -> tuple[list[str], str]:
    """The factories that `ampcheck policy lock` accepts, and the lock that it wrote in the copy."""
    path = copy / TESTS
    path.parent.mkdir(exist_ok=True)
    path.write_text(render_tests(tests), encoding="utf-8")
    if (copy / LOCK).exists():
        return [], ""
    names = []
    for name in (each.candidate.name for each in tests.models):
        show(f"locking the autocast policy of {name}")
        if run_command(copy, _SECONDS, "policy", "lock", f"{TESTS}:{name}") == 0:
            names.append(name)
    return names, (copy / LOCK).read_text(encoding="utf-8") if names else ""


def _script(repository: Repository, copy: Path, show: Callable[[str], None]) -> tuple[TrainingScript | None, bool]:
    """The training script that gets a test, and whether its function runs: two steps are tried in the copy."""
    scripts = [script for script in repository.scripts if script.function is not None]
    scripts.sort(key=lambda each: (each.needs != "", not each.source.path.rpartition("/")[2].startswith("train")))
    if not scripts or scripts[0].needs:
        return next(iter(scripts), None), False
    target = f"{scripts[0].source.path}:{scripts[0].function}"
    show(f"training two steps of {target} in a copy")
    return scripts[0], run_command(copy, _SECONDS, "audit", target, "--steps=2", "--fast", "-q") in (0, 1)


def _targets(tests: Contents) -> list[str]:
    names = [each.candidate.name for each in tests.models]
    names += [tests.unfinished.candidate.name] if tests.unfinished is not None else []
    if tests.script is None:
        names = names or ["model"]
    elif not tests.script_runs:
        names = names or ["training"]
    targets = [f"{TESTS}:{name}" for name in names]
    if tests.script is not None and tests.script_runs:
        targets.append(f"{tests.script.source.path}:{tests.script.function}")
    return targets


def _plan_settings(plan: Plan, folder: Path, before: str | None, targets: Sequence[str]) -> None:
    path = folder / pyproject.NAME
    if not targets:
        plan.left.append((path, "no targets are added beside tests that exist"))
    elif before is not None and pyproject.has_targets(folder):
        plan.left.append((path, f"[tool.ampcheck] has targets; new ones would be {listed(targets)}"))
    else:
        what = f"[tool.ampcheck] with the targets {listed(targets)}"
        plan.files.append(Planned(path, pyproject.with_targets(before, targets), what, before))


def _what(tests: Contents) -> str:
    parts = [f"tests of {listed([each.candidate.title for each in tests.models])}"] if tests.models else []
    if tests.unfinished is not None:
        parts.append(f"tests of {tests.unfinished.candidate.title}, skipped until you fill in its arguments")
    if not parts and tests.script is None:
        parts.append("tests, skipped until you fill in a model")
    if tests.script is not None:
        skipped = "" if tests.script_runs else ", skipped until you fill in what it needs"
        parts.append(f"a test of {tests.script.source.path}:{tests.script.function}{skipped}")
    return "; ".join(parts)


def _seen(repository: Repository) -> tuple[str, ...]:
    models = [model.name for model in repository.models]
    scripts = [script.source.path for script in repository.scripts]
    return (
        f"{len(repository.sources):,} Python files, {len(models):,} model classes: {listed(models) or 'none'}",
        f"training scripts: {listed(scripts) or 'none'}",
        f"tests: {len(repository.tests):,} files",
    )


def _notes(repository: Repository, tests: Contents, failed: Sequence[Tried]) -> list[str]:
    notes = [f"{each.candidate.title} did not run: {each.error}" for each in failed if each is not tests.unfinished][:4]
    if repository.unnameable:
        files = listed(repository.unnameable, 3)
        notes.append(f"no import statement can name {files}: rename to letters, digits and _ to have it tried")
    for path, names in unimportable(repository).items():
        notes.append(f"{names} of {path} cannot be imported without training: move the loop into a function")
    for script in repository.scripts:
        if script.function is None and len(notes) < 8:
            notes.append(f"{script.source.path}: {script.needs}; put `with ampcheck.watch():` around its loop")
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


def _torch_release() -> str:
    if not (version := installed("torch")):
        raise UsageError("ampcheck init runs the models, which needs torch; install it first")
    return release_of(version)
