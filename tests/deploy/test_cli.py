"""The `tandem` command as a user meets it: a process, its output, its exit status."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
TIMEOUT_S = 60
# Three times what it takes: importing torch or gRPC for a help text would show.
HELP_BUDGET_S = 3.0


def tandem(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from deploy.cli import main; main()", *arguments],
        env={**os.environ, "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{REPOSITORY / 'proto'}", **environment},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def assert_one_line(ended: subprocess.CompletedProcess[str], *parts: str) -> None:
    """Exit status 2 and a single line on stderr that holds each part; nothing on stdout."""
    assert ended.returncode == 2, ended.stderr
    assert ended.stdout == ""
    lines = ended.stderr.splitlines()
    assert lines[-1].startswith("tandem: "), ended.stderr
    assert all(line == "stopping what was started …" for line in lines[:-1])
    assert "Traceback" not in ended.stderr
    for part in parts:
        assert part in lines[-1]


def model_directory(tmp_path: Path) -> Path:
    """Enough of a model to get past the look at it."""
    path = tmp_path / "m"
    path.mkdir()
    (path / "config.json").write_text("{}")
    return path


def _cpu_s_of_children() -> float:
    """Processor time of children that have ended: what they need, not what else this machine does."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_help_teaches_with_examples_and_is_quick() -> None:
    before_s = _cpu_s_of_children()
    ended = tandem("--help")
    assert _cpu_s_of_children() - before_s < HELP_BUDGET_S
    assert ended.returncode == 0
    for command in ("serve", "generate", "status", "model", "key", "version"):
        assert command in ended.stdout
    assert "tandem generate" in ended.stdout


def test_help_imports_neither_torch_nor_grpc() -> None:
    program = (
        "import sys\nfrom deploy.cli import app\n"
        "try: app(['--help'])\nexcept SystemExit: pass\n"
        "print(sorted({'torch', 'grpc', 'httpx', 'pydantic', 'redis'} & set(sys.modules)))\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, timeout=TIMEOUT_S, check=True
    )
    assert ended.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    "flag",
    ["--config", "--model", "--dtype", "--backend", "--prefill", "--decode", "--aggregated", "--transport",
     "--block-tokens", "--host", "--port", "--grpc-port", "--redis-url", "--seed", "--quantization", "--num-threads",
     "--served-model-name", "--max-model-len", "--chat-template-file", "--allowed-origin", "--sampling-defaults",
     "--log-requests"],
)  # fmt: skip
def test_serve_has_the_flag(flag: str, serve_help: str) -> None:
    assert flag in serve_help


@pytest.fixture(scope="module")
def serve_help() -> str:
    return tandem("serve", "--help", COLUMNS="160").stdout


def test_missing_model_says_what_to_do(tmp_path: Path) -> None:
    assert_one_line(tandem("serve", TANDEM_HOME=str(tmp_path)), "tandem model fetch SmolLM2-135M-Instruct")


def test_corrupt_model_says_what_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"\x00" * 100)
    assert_one_line(tandem("serve", "--model", str(path)), str(path), "GGUF")


def test_damaged_default_model_says_how_to_replace_it(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(b"GGUF cut short")
    assert_one_line(tandem("serve", TANDEM_HOME=str(tmp_path)), "damaged", "tandem model fetch")


def test_unreadable_config_names_file_line_and_key(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("model: m\ndecode:\n  wrokers: 2\n")
    ended = tandem("serve", "--config", str(path))
    assert_one_line(ended, f"{path}:3: decode.wrokers: unknown key; did you mean 'workers'?")
    assert_one_line(tandem("serve", "--config", str(tmp_path / "none.yaml")), "cannot be read: No such file")


def test_busy_port_names_the_port_and_the_flag(tmp_path: Path) -> None:
    model = model_directory(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        ended = tandem("serve", "--model", str(model), "--port", port, TANDEM_RUNTIME_DIR=str(tmp_path / "run"))
    assert_one_line(ended, f"127.0.0.1:{port}", "--port")
    assert [path.name for path in (tmp_path / "run").iterdir()] == [".lock"]


def test_open_address_without_keys_is_refused(tmp_path: Path) -> None:
    model = model_directory(tmp_path)
    assert_one_line(tandem("serve", "--model", str(model), "--host", "0.0.0.0"), "tandem key create")  # noqa: S104


def test_flags_that_cannot_serve_are_one_line() -> None:
    assert_one_line(tandem("serve", "--decode", "0"), "no worker decodes")


def test_status_and_generate_without_a_cluster_say_how_to_start_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
    assert_one_line(tandem("status", "--url", url), url, "tandem serve")
    assert_one_line(tandem("generate", "hello", "--url", url), url, "tandem serve")
    assert_one_line(tandem("explain", "chatcmpl-1", "--url", url), url, "tandem serve")


def test_key_is_shown_once_and_only_its_digest_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "keys.txt"
    ended = tandem("key", "create", "alice", "--file", str(file))
    key = ended.stdout.strip()
    assert ended.returncode == 0
    assert len(key) > 40
    assert key not in file.read_text()
    assert file.read_text().startswith("alice ")
    assert file.stat().st_mode & 0o777 == 0o600
    tandem("key", "create", "olga", "--admin", "--file", str(file))
    assert file.read_text().splitlines()[1].endswith(" admin")
    assert_one_line(tandem("key", "create", "alice", "--file", str(file)), "alice already")
    assert_one_line(tandem("key", "create", "a b", "--file", str(file)), "'a b'")


def test_check_names_everything_that_a_start_would_stumble_over(tmp_path: Path) -> None:
    model, wrong, good = model_directory(tmp_path), tmp_path / "wrong.yaml", tmp_path / "good.yaml"
    good.write_text(f"model: {model}\ndecode: {{workers: 3}}\n")
    wrong.write_text(
        "router: {host: 0.0.0.0, api_keys_file: none.txt, chat_template_file: none.jinja, ssl_certfile: none.pem}\n"
        "autoscale: none.yaml\nmodel: nothing\n"
    )
    typos = tmp_path / "typos.yaml"
    typos.write_text("modle: a\ndecode:\n  wrokers: 2\n")
    ended = tandem("check", *map(str, (good, wrong, typos)))
    assert ended.returncode == 1
    assert ended.stdout == f"{good}: ok, m by 1 prefill + 3 decode workers at 127.0.0.1, 8000\n"
    lines = ended.stderr.splitlines()
    assert [line.split(": ")[1] for line in lines] == [
        "model", "router.api_keys_file", "router.ssl_certfile", "router.chat_template_file", "autoscale",
        "decode.wrokers", "modle",
    ]  # fmt: skip
    assert lines[-1].startswith(f"{typos}:1: ")
    assert tandem("check", str(good)).returncode == 0


def test_tls_files_that_cannot_be_used_end_the_start_with_one_line(tmp_path: Path) -> None:
    files = {f"ssl_{name}": str(tmp_path / f"{name}.pem") for name in ("certfile", "keyfile")}
    flags = [f"--{name.replace('_', '-')}={file}" for name, file in files.items()]
    model = ("--engine", "mock", "--model", str(model_directory(tmp_path)), "--port", "0")
    runtime = {"TANDEM_RUNTIME_DIR": str(tmp_path / "run")}
    assert_one_line(tandem("serve", *model, flags[0], **runtime), "ssl_keyfile is missing")
    assert_one_line(tandem("serve", *model, *flags, **runtime), "cannot read ssl_certfile", files["ssl_certfile"])
    key = {"TANDEM_SSL_KEYFILE": files["ssl_keyfile"]}
    assert_one_line(tandem("serve", *model, **key, **runtime), "ssl_certfile is missing")
    assert_one_line(
        tandem("status", "--url", "https://127.0.0.1:1", "--ca-file", files["ssl_certfile"]), "certfile.pem"
    )


def test_a_model_of_the_hub_is_fetched_and_its_failure_is_one_line(tmp_path: Path) -> None:
    ended = tandem("serve", "nobody/nothing", HF_HUB_OFFLINE="1", TANDEM_HOME=str(tmp_path))
    assert ended.returncode == 2
    assert ended.stdout == ""
    lines = ended.stderr.splitlines()
    assert lines[0] == "nobody/nothing is not on this machine"
    assert lines[-1].startswith("tandem: cannot fetch nobody/nothing: Hugging Face hub: ")


def test_a_model_is_named_once(tmp_path: Path) -> None:
    assert_one_line(tandem("serve", "nothing", TANDEM_HOME=str(tmp_path)), "'nothing'")
    assert tandem("serve", "one", "--model", "two").returncode == 2


def test_policy_check_names_file_line_and_key(tmp_path: Path) -> None:
    good = tandem("policy", "check", *map(str, sorted((REPOSITORY / "deploy" / "policies").glob("*.yaml"))))
    assert good.returncode == 0, good.stderr
    assert good.stdout.count(": ok, policy ") == 4
    wrong = tmp_path / "mine.yaml"
    wrong.write_text("version: 1\nslo:\n  ttft_mss: 5.0\n")
    ended = tandem("policy", "check", str(wrong))
    assert ended.returncode == 1
    assert f"{wrong}:3: slo.ttft_mss: unknown key" in ended.stderr


def test_version_names_what_it_runs_on() -> None:
    ended = tandem("version")
    assert ended.returncode == 0
    assert ended.stdout.startswith("tandem ")
    assert "torch " in ended.stdout


def test_version_is_an_option_too() -> None:
    ended = tandem("--version")
    assert (ended.returncode, ended.stdout) == (0, tandem("version").stdout.splitlines()[0] + "\n")


def test_wrong_option_is_status_2() -> None:
    ended = tandem("serve", "--no-such-flag")
    assert ended.returncode == 2
    assert "--no-such-flag" in ended.stderr
