"""`--ampcheck-watch`: the tests of a repository as they are, under AMP and watched."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
import torch

from ampcheck.autocast.emulate import emulated_policy
from ampcheck.core.run import Finding, Run
from ampcheck.plugin import by_cause, circumstances, suite  # noqa: F401  # pytester forgets what its sessions import
from ampcheck.watch import watched


@pytest.fixture(autouse=True, scope="module")
def imported() -> None:
    """What a watch imports late is imported: pytester would forget it, and PyTorch cannot be imported twice."""
    for name in ("torch._dynamo", "torch._inductor.compile_fx"):
        importlib.import_module(name)
    with watched(name="imports") as seen:
        torch.nn.functional.linear(torch.ones(1, 1), torch.ones(1, 1))
    assert seen.run.findings
    emulated_policy("cuda")


LIBRARY = """
import torch

class Overflows(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(8, 8)
        torch.nn.init.ones_(self.inner.weight)

    def forward(self, x):
        return self.inner(x) * 10000.0

def positions(n):
    return (torch.ones(n, 1) @ torch.ones(1, n)).sum(0).cumsum(0) / n

def numbered(steps):
    return torch.nn.functional.linear(torch.arange(float(steps)).unsqueeze(1), torch.ones(1, 1)).squeeze(1)

def demands(x):
    rows = torch.nn.functional.linear(x, torch.ones(4, 4))
    if rows.dtype is not x.dtype:
        raise ValueError("the dtypes differ")

def mixes(x):
    return torch.lerp(x, torch.nn.functional.linear(x, torch.ones(4, 4)), 0.5)
"""


@pytest.fixture
def library(pytester: pytest.Pytester) -> pytest.Pytester:
    """A repository with a small library, whose tests can `from library import ...`."""
    pytester.makepyfile(library=LIBRARY)
    return pytester


def watch(pytester: pytest.Pytester, *options: str, code: str = "") -> tuple[pytest.RunResult, Run]:
    """Run the tests with `--ampcheck-watch`; the result, and the run that it wrote."""
    if code:
        pytester.makepyfile(test_it=code)
    result = pytester.runpytest("-n0", "--ampcheck-watch", "--ampcheck-json=run.json", *options)
    return result, Run.load(pytester.path / "run.json")


def problems(run: Run) -> list[tuple[str, str, str, int | None]]:
    """Check, verdict, file and line of what was found."""
    shown = (f for f in run.findings if f.verdict.value not in ("pass", "skip"))
    return [(f.check, f.verdict.value, Path(f.where.file).name, f.where.line) for f in shown]


def of_check(run: Run, check: str) -> list[Finding]:
    return [f for f in run.findings if f.check == check and f.verdict.value in ("fail", "warn")]


def line_of(text: str) -> int:
    return next(number for number, line in enumerate(LIBRARY.strip().splitlines(), 1) if text in line)


OVERFLOWS = """
import pytest
import torch
from library import Overflows

@pytest.mark.parametrize("rows", [1, 2, 3])
def test_shape(rows):
    assert Overflows()(torch.ones(rows, 8)).shape == (rows, 8)
"""

HEALTHY = """
import pytest
import torch
import unittest

@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))

@pytest.fixture
def data():
    return torch.randn(5, 8)

@pytest.mark.parametrize("scale", [0.5, 2.0])
def test_forward(model, data, scale):
    assert model(data * scale).isfinite().all()

class TestTraining:
    def test_it_learns(self, model, data):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        losses = []
        for _ in range(4):
            loss = model(data).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < losses[0]

class TestCase(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.shared = torch.nn.Linear(3, 3)

    def setUp(self):
        self.x = torch.ones(2, 3)

    def test_forward(self):
        self.assertEqual(self.shared(self.x).shape, (2, 3))

def test_integers():
    assert (torch.arange(4) * 2).sum() == 12

def test_nothing():
    pass
"""


def test_an_overflow_in_a_model_is_one_finding_at_the_users_line(library: pytest.Pytester) -> None:
    result, run = watch(library, "--ampcheck-dtype=float16", code=OVERFLOWS)
    result.assert_outcomes(passed=3)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    (finding,) = of_check(run, "overflow")
    assert (finding.where.file, finding.where.line) == ("library.py", line_of("* 10000.0"))
    assert finding.subject == "test_it.py::test_shape[1] under float16 autocast"
    assert finding.message.startswith("in this and in 2 more tests: ")
    assert "test_it.py::test_shape[1]" in finding.reproduce
    assert "--ampcheck-watch --ampcheck-dtype=float16" in finding.reproduce
    assert problems(watch(library, code=OVERFLOWS)[1]) == []  # bfloat16 reaches further


def test_indices_that_collide_in_bfloat16_are_found(library: pytest.Pytester) -> None:
    code = "import torch\nfrom library import numbered\ndef test_ids(): torch.zeros(999)[numbered(999).long()]"
    _, run = watch(library, code=code)
    assert problems(run) == [("integer-cast", "fail", "library.py", line_of("torch.arange(float"))]
    assert problems(watch(library, code=code.replace("999", "99"))[1]) == []


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "half"])
def test_a_healthy_suite_is_silent(pytester: pytest.Pytester, dtype: str) -> None:
    result, run = watch(pytester, f"--ampcheck-dtype={dtype}", code=HEALTHY)
    result.assert_outcomes(passed=6)
    assert result.ret == pytest.ExitCode.OK
    assert problems(run) == []
    assert run.coverage.seen["16-bit ops"] >= 100
    result.stdout.fnmatch_lines(["watched 6 tests * beside * of the tests themselves, *x in all, and * s to start"])
    result.stdout.no_fnmatch_line("*its own assertion*")


def test_a_tests_own_assertion_is_reported_apart(pytester: pytest.Pytester) -> None:
    code = """
        import torch
        model = torch.nn.Linear(4, 4)
        x = torch.randn(3, 4)
        expected = model(x)
        def test_dtype(): assert model(x).dtype is torch.float32
        def test_bits(): torch.testing.assert_close(model(x), expected, rtol=0, atol=0)
        def test_numpy(): model(x).detach().numpy()
        def test_fails_anyway(): assert model(x).shape == (4, 3)
    """
    result, run = watch(pytester, code=code)
    result.assert_outcomes(passed=3, failed=1)
    assert problems(run) == []
    result.stdout.fnmatch_lines(
        [
            "not watched, since it fails without AMP, too: test_it.py::test_fails_anyway",
            "fails under bfloat16 autocast: its own assertion: test_it.py::test_bits (AssertionError: *",
            "fails under bfloat16 autocast: its own assertion: test_it.py::test_dtype (AssertionError: *",
            "fails under bfloat16 autocast: the test itself raises: test_it.py::test_numpy (TypeError: *",
        ]
    )


def test_what_only_assertions_read_is_the_tests_own_comparison(library: pytest.Pytester) -> None:
    code = """
        import torch

        def results():
            torch.manual_seed(1)
            sparse = torch.tensor([[0.0, 0, 3], [4, 0, 5]]).to_sparse()
            dense = torch.randn(3, 3)
            return torch.dsmm(sparse, dense), torch.mm(sparse.to_dense(), dense)

        def test_asserts():
            first, second = results()
            assert torch.norm(first - second) < 9

        def test_assigns():
            first, second = results()
            difference = first - second
            largest = difference.abs().max()
            assert largest < 9, difference
    """
    assert problems(watch(library, code=code)[1]) == []


@pytest.mark.xfail(strict=True, reason="the law of own errors excuses a difference that the code goes on with")
def test_what_the_code_goes_on_with_is_no_comparison_of_the_test(library: pytest.Pytester) -> None:
    code = """
        import torch

        def test_uses():
            torch.manual_seed(1)
            sparse = torch.tensor([[0.0, 0, 3], [4, 0, 5]]).to_sparse()
            dense = torch.randn(3, 3)
            rest = torch.dsmm(sparse, dense) - torch.mm(sparse.to_dense(), dense)
            scale = 1.0 / rest.norm().item()
    """
    found = problems(watch(library, code=code)[1])
    assert [(check, file) for check, _, file, _ in found] == [("precision-loss", "test_it.py")]


def test_a_helper_that_compares_dtypes_is_an_assertion_of_the_tests(library: pytest.Pytester) -> None:
    package = library.mkpydir("package")
    code = "import torch\ndef close(a, b):\n    return torch.allclose(a, b, rtol=1.0)\n"
    package.joinpath("code.py").write_text(code)
    package.joinpath("testing").mkdir()
    package.joinpath("testing", "__init__.py").write_text(code)
    test = """
        import torch
        from package.{module} import close
        def test_it(): assert close(torch.nn.Linear(2, 2)(torch.ones(1, 2)), torch.ones(1, 2)) in (True, False)
    """
    assert problems(watch(library, code=test.format(module="testing"))[1]) == []
    found = problems(watch(library, code=test.format(module="code"))[1])
    assert found == [("policy-unregistered", "fail", "code.py", 3)]


def test_only_the_suites_own_failures_leave_the_exit_code_alone(pytester: pytest.Pytester) -> None:
    code = "import torch\ndef test_dtype(): assert torch.nn.Linear(2, 2)(torch.ones(1, 2)).dtype is torch.float32"
    assert watch(pytester, code=code)[0].ret == pytest.ExitCode.OK


def test_library_code_that_cannot_run_under_autocast_is_a_finding(library: pytest.Pytester) -> None:
    code = """
        import pytest
        import torch
        from library import demands, mixes
        def test_mixes(): mixes(torch.ones(4, 4))
        def test_demands(): demands(torch.ones(4, 4))
        def test_expects():
            with pytest.raises(RuntimeError): mixes(torch.ones(3))
    """
    result, run = watch(library, code=code)
    result.assert_outcomes(passed=3)
    assert sorted(problems(run), reverse=True) == [
        ("policy-unregistered", "fail", "library.py", line_of("torch.lerp")),  # it says why
        ("low-precision-error", "fail", "library.py", line_of("raise ValueError")),
    ]


def test_backward_in_our_autocast_is_no_mistake_and_in_the_tests_own_region_it_is(pytester: pytest.Pytester) -> None:
    code = """
        import torch
        def test_it():
            model = torch.nn.Linear(4, 4)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            {region}
                model(torch.ones(2, 4)).sum().backward()
                optimizer.step()
    """
    assert problems(watch(pytester, code=code.format(region="if True:"))[1]) == []
    region = "with torch.autocast('cpu', torch.bfloat16):"
    found = [check for check, *_ in problems(watch(pytester, code=code.format(region=region))[1])]
    assert found == ["autocast-scope", "autocast-scope"]


def test_the_products_of_an_optimizer_are_not_under_our_autocast(pytester: pytest.Pytester) -> None:
    code = """
        import torch
        seen = []
        class Rotates(torch.optim.Optimizer):
            @torch.no_grad()
            def step(self):
                for group in self.param_groups:
                    for p in group["params"]:
                        seen.append((p.grad @ p.grad.mT).dtype)
        def test_it():
            model = torch.nn.Linear(4, 4, bias=False)
            optimizer = Rotates(model.parameters(), {})
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            assert model(torch.ones(2, 4)).shape == (2, 4)
            assert set(seen) == {torch.float32}
    """
    result, run = watch(pytester, code=code)
    result.assert_outcomes(passed=1)
    assert problems(run) == []


def test_a_step_that_raises_leaves_autocast_as_it_is(pytester: pytest.Pytester) -> None:
    code = """
        import pytest, torch
        class Refuses(torch.optim.SGD):
            def step(self):
                raise RuntimeError("refused")
        def test_it():
            model = torch.nn.Linear(4, 4)
            model(torch.ones(2, 4)).sum().backward()
            with pytest.raises(RuntimeError):
                Refuses(model.parameters(), lr=0.1).step()
    """
    assert problems(watch(pytester, code=code)[1]) == []


def test_a_fixture_builds_the_model(library: pytest.Pytester) -> None:
    code = """
        import pytest, torch
        from library import Overflows
        @pytest.fixture(scope="module")
        def shared(): return Overflows()
        @pytest.fixture
        def output(shared): return shared(torch.ones(2, 8))
        def test_it(output): assert output.shape == (2, 8)
    """
    _, run = watch(library, "--ampcheck-dtype=float16", code=code)
    assert problems(run) == [("overflow", "fail", "library.py", line_of("* 10000.0"))]


def test_half_casts_models_and_inputs_and_gives_wide_fixtures_back(library: pytest.Pytester) -> None:
    code = """
        import pytest, torch
        from library import Overflows
        @pytest.fixture(scope="module")
        def model(): return torch.nn.Linear(4, 4)
        def test_shape(): assert Overflows()(torch.ones(2, 8)).shape == (2, 8)
        def test_first(model): model(torch.ones(2, 4)).sum().backward()
        def test_second(model):
            assert model.weight.dtype is torch.float32 and model.weight.grad.dtype is torch.float32
    """
    result, run = watch(library, "--ampcheck-dtype=half", code=code)
    result.assert_outcomes(passed=3)
    assert problems(run) == [("overflow", "fail", "library.py", line_of("* 10000.0"))]
    assert of_check(run, "overflow")[0].subject.endswith(" with models in float16")


def test_half_judges_no_cast_of_its_own_when_it_gives_weights_back(pytester: pytest.Pytester) -> None:
    code = """
        import torch
        class Scaled(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = torch.nn.Parameter(torch.full((4,), 1e6))
            def forward(self, x): return x * self.weight
        def test_scaled(): assert Scaled()(torch.ones(4)).shape == (4,)
    """
    _, run = watch(pytester, "--ampcheck-dtype=half", code=code)
    (overflow,) = of_check(run, "overflow")
    assert overflow.where.file == "test_it.py"


def test_the_policy_of_cuda_is_emulated(pytester: pytest.Pytester) -> None:
    code = """
        import torch
        def test_banned():
            p = torch.sigmoid(torch.nn.Linear(4, 1)(torch.ones(2, 4)))
            torch.nn.functional.binary_cross_entropy(p, torch.ones(2, 1))
    """
    assert problems(watch(pytester, "--ampcheck-dtype=float16", code=code)[1]) == []  # the CPU bans nothing
    _, run = watch(pytester, "--ampcheck-dtype=float16", "--ampcheck-device=cuda", code=code)
    assert [(check, verdict) for check, verdict, *_ in problems(run)] == [("policy-banned", "fail")]
    assert of_check(run, "policy-banned")[0].subject == "test_it.py::test_banned under float16 autocast [cuda emulated]"


def test_later_tests_draw_the_numbers_that_they_draw_without_the_watch(pytester: pytest.Pytester) -> None:
    code = """
        import random, torch
        from pathlib import Path
        drawn = []
        def test_first(): drawn.append(torch.rand(1).item())
        def test_second():
            drawn.append((torch.rand(1).item(), random.random()))
            Path("drawn.txt").write_text(repr(drawn[-1]))
    """
    pytester.makepyfile(test_it=code)
    pytester.makeconftest("import random, torch; torch.manual_seed(3); random.seed(3)")
    pytester.runpytest_subprocess("-n0").assert_outcomes(passed=2)
    drawn = Path(pytester.path, "drawn.txt").read_text()
    pytester.makeconftest("import random, torch; torch.manual_seed(3); random.seed(3) ")
    pytester.runpytest_subprocess("-n0", "--ampcheck-watch")
    assert Path(pytester.path, "drawn.txt").read_text() == drawn


def test_a_test_that_does_not_pass_twice_is_named_and_keeps_its_result(pytester: pytest.Pytester) -> None:
    code = "import torch\nran = []\ndef test_once():\n    ran.append(torch.ones(1))\n    assert len(ran) == 1"
    result, run = watch(pytester, code=code)
    result.assert_outcomes(passed=1)
    assert (result.ret, problems(run)) == (pytest.ExitCode.OK, [])
    result.stdout.fnmatch_lines(["not judged, as it does not pass a second time: test_it.py::test_once (*"])


SHARED = """
    import pytest, torch

    @pytest.fixture(scope="{scope}")
    def counted():
        print("set up", torch.is_autocast_enabled("cpu"))
        yield {{"calls": 0, "model": torch.nn.Linear(2, 2)}}
        print("torn down")

    class TestShared:
        made = 0

        @classmethod
        def setup_class(cls):
            cls.made = 0

        def test_1(self, counted):
            counted["calls"] += 1
            counted["model"](torch.ones(2, 2))

        def test_2(self, counted):
            assert counted["calls"] == 1

        def test_3(self):
            type(self).made += 1
            torch.mm(torch.ones(2, 2), torch.ones(2, 2))

        def test_4(self):
            assert self.made == 1
"""


@pytest.mark.parametrize("scope", ["class", "module", "session"])
@pytest.mark.parametrize("options", [(), ("-x", "test_it.py", "test_other.py")], ids=["all", "ends early"])
def test_tests_that_share_a_fixture_pass_as_without_the_watch(
    pytester: pytest.Pytester, scope: str, options: tuple[str, ...]
) -> None:
    pytester.makepyfile(test_other="def test_fails(): assert False")
    result, run = watch(pytester, *(options or ("test_it.py",)), code=SHARED.format(scope=scope))
    result.assert_outcomes(passed=4, failed=len(options[:1]))
    assert problems(run) == []
    assert "second time" not in result.stdout.str()
    shown = result.stdout.str() + result.stderr.str()
    assert shown.count("torn down") == (len(options) > 0 and scope == "session")  # captured for the test that fails


def test_a_test_that_fails_under_autocast_leaves_the_next_one_fixtures_that_are_watched(
    pytester: pytest.Pytester,
) -> None:
    code = """
        import pytest, torch
        seen = []

        @pytest.fixture(scope="session")
        def overflowing():
            seen.append(torch.is_autocast_enabled("cpu"))
            return torch.mm(torch.full((2, 2), 300.0).half(), torch.full((2, 2), 300.0).half()).float()

        def test_dtype(overflowing):
            assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.float32

        def test_next(overflowing):
            assert overflowing.shape == (2, 2)
            assert seen[-1] == torch.is_autocast_enabled("cpu")
    """
    result, _ = watch(pytester, code=code)
    result.assert_outcomes(passed=2)
    assert "second time" not in result.stdout.str()
    assert "::test_next" not in "".join(line for line in result.outlines if line.startswith("fails"))


def test_marks_and_hooks_of_pytest_hold_in_the_second_pass_and_its_warnings_are_not_counted(
    pytester: pytest.Pytester,
) -> None:
    code = """
        import pytest, torch, warnings

        @pytest.mark.filterwarnings("error")
        def test_raises():
            with pytest.raises(UserWarning):
                warnings.warn("loud")
            torch.mm(torch.ones(2, 2), torch.ones(2, 2))

        def test_warns():
            warnings.warn("once")
            torch.mm(torch.ones(2, 2), torch.ones(2, 2))
    """
    result, _ = watch(pytester, "-Wdefault", code=code)
    result.assert_outcomes(passed=2, warnings=1)
    assert "second time" not in result.stdout.str()


def test_the_body_draws_what_it_drew_whoever_set_up_its_fixtures(pytester: pytest.Pytester) -> None:
    code = """
        import pytest, torch

        @pytest.fixture(scope="module")
        def drawn():
            return torch.rand(3)

        def test_first(drawn):
            assert not torch.is_autocast_enabled("cpu") or pytest.skip("here alone")

        numbers = {}

        def test_second(drawn):
            assert numbers.setdefault("body", float(torch.rand(1))) == numbers["body"]
            again = float(torch.rand(1))
            assert numbers.setdefault("again", again) == again
    """
    result, _ = watch(pytester, code=code)
    assert "::test_second" not in "".join(line for line in result.outlines if "second time" in line)


def test_a_test_with_a_subtest_that_fails_as_it_is_is_not_watched(pytester: pytest.Pytester) -> None:
    code = """
        import unittest
        import torch
        class Fails(unittest.TestCase):
            def test_it(self):
                with self.subTest(size=1):
                    assert torch.ones(1).sum() == 2
    """
    result, _ = watch(pytester, code=code)
    result.stdout.fnmatch_lines(["not watched, *test_it.py::Fails::test_it"])


def test_subtests_that_fail_under_autocast_alone_are_listed_and_fail_nothing(pytester: pytest.Pytester) -> None:
    code = """
        import unittest
        import torch
        class Dtypes(unittest.TestCase):
            def test_it(self):
                for size in (2, 3):
                    with self.subTest(size=size):
                        assert torch.mm(torch.ones(size, size), torch.ones(size, size)).dtype is torch.float32
    """
    result, run = watch(pytester, code=code)
    assert result.ret == 0
    assert "SUBFAIL" not in result.stdout.str()
    assert problems(run) == []
    result.stdout.fnmatch_lines(["fails under bfloat16 autocast: its own assertion: *::test_it (AssertionError: *"])


def test_a_test_that_ends_before_it_runs_an_op_fails_nothing(pytester: pytest.Pytester) -> None:
    code = """
        import torch
        names = set()
        def test_registers_once():
            assert "name" not in names
            names.add("name")
        def test_is_not_under_autocast():
            assert not torch.is_autocast_enabled("cpu")
    """
    result, run = watch(pytester, code=code)
    assert result.ret == 0
    assert problems(run) == []


def test_the_budget_ends_the_watch_of_a_slow_test_and_names_it(
    library: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ampcheck.plugin.outcomes._CREDIT", 0.0)
    slow = "def test_slow():\n    for _ in range(100000): torch.ones(2) + 1\ndef test_late(): torch.ones(2) + 1"
    code = f"{OVERFLOWS}\n{slow}"
    result, _ = watch(library, "--ampcheck-dtype=float16", "--ampcheck-budget=0.5", code=code)
    result.assert_outcomes(passed=5)
    result.stdout.fnmatch_lines(["watched in part, the budget ended it (--ampcheck-budget): *test_slow (* s)"])
    result.stdout.fnmatch_lines(["not watched, beyond the budget (--ampcheck-budget): *test_late (* s)"])


def test_the_baseline_accepts_a_cause_in_whichever_test_it_appears(library: pytest.Pytester) -> None:
    from ampcheck.cli.main import main

    library.makepyprojecttoml("[tool.ampcheck]\n")
    result, _ = watch(library, "--ampcheck-dtype=float16", "--ampcheck-sarif=run.sarif", code=OVERFLOWS)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    sarif = json.loads((library.path / "run.sarif").read_text())
    assert len(sarif["runs"][0]["results"]) == 1
    main(["baseline", "--from", "run.json", "--reason", "known"])
    assert (library.path / "ampcheck.baseline.json").exists()
    for options in ((), ("-k", "3")):
        assert watch(library, "--ampcheck-dtype=float16", *options)[0].ret == pytest.ExitCode.OK


def test_workers_of_xdist_report_what_one_process_reports(library: pytest.Pytester) -> None:
    library.makepyfile(test_it=OVERFLOWS, test_more=HEALTHY)
    found = {}
    for spread in ("-n0", "-n2"):
        result = library.runpytest_subprocess(
            spread, "--ampcheck-watch", "--ampcheck-dtype=float16", "--ampcheck-json=run.json"
        )
        result.assert_outcomes(passed=9)
        assert result.ret == pytest.ExitCode.TESTS_FAILED
        run = Run.load(library.path / "run.json")
        found[spread] = [(f.check, f.verdict, f.subject, f.where) for f in run.findings if f.verdict == "fail"]
    assert found["-n0"] == found["-n2"]
    assert len(found["-n0"]) == 1


def test_compiled_functions_run_compiled_on_request(library: pytest.Pytester) -> None:
    library.makepyfile(
        """
        import torch
        compiled = torch.compile(lambda x: (x * 300.0).half() * 300.0, backend="aot_eager")
        def test_it(): assert compiled(torch.ones(3)).shape == (3,)
        """
    )
    found = {}
    for options in ([], ["--ampcheck-compile"]):
        library.runpytest_subprocess("-n0", "--ampcheck-watch", "--ampcheck-json=run.json", *options)
        run = Run.load(library.path / "run.json")
        found[bool(options)] = sorted((check, verdict) for check, verdict, *_ in problems(run))
    assert found[False] == [("coverage", "warn"), ("overflow", "fail")]
    assert found[True] == [("overflow", "fail")]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ampcheck-dtype=float16"], "*--ampcheck-dtype needs --ampcheck-watch*"),
        (["--ampcheck-watch", "--ampcheck-dtype=float8"], "*float8 is unknown: choose one of bfloat16, float16, half*"),
        (["--ampcheck-watch", "--ampcheck-budget=no"], "*--ampcheck-budget=no must be a number above 0*"),
    ],
)
def test_wrong_options_are_usage_errors(pytester: pytest.Pytester, options: list[str], message: str) -> None:
    result = pytester.runpytest("-n0", *options)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([message])


def test_the_ini_file_switches_it_on(library: pytest.Pytester) -> None:
    library.makeini("[pytest]\nampcheck_watch = true\nampcheck_dtype = float16\nampcheck_json = run.json")
    library.makepyfile(test_it=OVERFLOWS)
    assert library.runpytest("-n0").ret == pytest.ExitCode.TESTS_FAILED
    assert of_check(Run.load(library.path / "run.json"), "overflow")
