"""Bad values of the benchmarks' options end with a usage error that says what would have been right."""

from __future__ import annotations

import pytest

import benchmarks.engine
import benchmarks.kernels
import benchmarks.speculation
from engine.native.build import build


@pytest.mark.parametrize(
    ("parse", "arguments", "said"),
    [
        (benchmarks.kernels.parse_arguments, "--formats INT8", "choose from F32, BF16, BF16_COMPRESSED, Q4_1, Q8_0"),
        (benchmarks.kernels.parse_arguments, "--formats Q4_1,", "no ''"),
        (benchmarks.kernels.parse_arguments, "--rows 1,many", "'1,many': give whole numbers above 0"),
        (benchmarks.kernels.parse_arguments, "--rows 0", "whole numbers above 0"),
        (benchmarks.kernels.parse_arguments, "--isa avx1024", "'avx1024' does not run here: choose from"),
        (benchmarks.engine.parse_arguments, "--batches 1;4", "'1;4': give whole numbers above 0"),
        (benchmarks.engine.parse_arguments, "--contexts=", "'': give whole numbers above 0"),
        (benchmarks.engine.parse_arguments, "--prompts 1,-2", "whole numbers above 0"),
        (benchmarks.engine.parse_arguments, "--isa avx1024", "does not run here"),
        (benchmarks.speculation.parse_arguments, "--drafters auto,eagel", "no 'eagel' here: choose from auto, ngram"),
    ],
)
def test_a_bad_value_is_refused_by_name(
    parse: object, arguments: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    build()
    assert callable(parse)
    with pytest.raises(SystemExit) as ended:
        parse(arguments.split())
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_good_values_are_taken() -> None:
    build()
    options = benchmarks.kernels.parse_arguments(["--formats", "Q4_1, F32", "--rows", "1, 16", "--isa", "portable"])
    assert (options.formats, options.rows, options.isa) == (["Q4_1", "F32"], [1, 16], "portable")
    assert benchmarks.engine.parse_arguments(["--prompts", ""]).prompts == []
    assert benchmarks.speculation.parse_arguments([]).drafters == ["auto", "eagle"]
