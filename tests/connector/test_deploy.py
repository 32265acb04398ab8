# SPDX-License-Identifier: Apache-2.0
"""The files of docs/deploy: that they fit together, that kvdisk and vLLM take what is in them, and
that linters do. The server's test asks a real one for the probes' paths."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import make_wheel
import pytest
import yaml
from support.users import user
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from kvdisk.config import PARSERS, Config
from kvdisk.connector.versions import SUPPORTED_VERSIONS
from kvdisk.device.drives import check_directories
from kvdisk.device.store import Store
from kvdisk.environment import transfer_of, variables

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "docs" / "deploy"
OF_VLLM_BYTES = 16 << 30
"""Host memory that is left for vLLM beside the CPU tier."""

KUBERNETES = {one["kind"]: one for one in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())}
POD = KUBERNETES["Deployment"]["spec"]["template"]["spec"]
(VLLM,) = POD["containers"]
(CHECK,) = POD["initContainers"]
DOCKERFILE = re.sub(r"\\\n\s*", "", (DEPLOY / "Dockerfile").read_text())
STEPS = [(step, rest) for step, rest in re.findall(r"^([A-Z]+) (.*)$", DOCKERFILE, re.MULTILINE)]


def interpolated(text: str) -> str:
    """Return a compose file as the tool reads it, with defaults for what the user may set."""
    text = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)
    return re.sub(r"\$\{\w+:\?[^}]*\}", "/nvme/kvdisk", text)


STACK, LLM_D, KSERVE, SKYPILOT = (
    yaml.safe_load((DEPLOY / f"{name}.yaml").read_text())
    for name in ("production-stack", "llm-d", "kserve", "skypilot")
)
KSERVE_POD = KSERVE["spec"]["predictor"]
OF_A_POD = (
    *("containers", "enableServiceLinks", "initContainers", "securityContext"),
    *("terminationGracePeriodSeconds", "volumes"),
)
"""Fields of a pod that recipes set."""
CHECK_COMMAND = "kvdisk check || [ $? -eq 1 ]"
COMPOSE = yaml.safe_load(interpolated((DEPLOY / "compose.yaml").read_text()))
SERVICES = COMPOSE["services"]


def settings_of_kubernetes(container: dict[str, Any]) -> dict[str, str]:
    """Return the variables that a container is given by the ConfigMap."""
    (source,) = container["envFrom"]
    assert source["configMapRef"]["name"] == KUBERNETES["ConfigMap"]["metadata"]["name"]
    variables: dict[str, str] = KUBERNETES["ConfigMap"]["data"]
    return variables


def listed(container: dict[str, Any]) -> dict[str, str]:
    """Return the variables of a container's own."""
    return {one["name"]: one["value"] for one in container["env"] if "value" in one}


SETTINGS = {"KVDISK_STORE_DIRS": "/nvme/kv", "KVDISK_NVME_BYTES": "500GiB", "KVDISK_CPU_BYTES": "32GiB"}
"""What every file sets."""


def probe_paths() -> set[str]:
    """Return what is asked of the server to know whether it lives."""
    probes = [VLLM[f"{kind}Probe"]["httpGet"] for kind in ("startup", "readiness", "liveness")]
    assert {probe["port"] for probe in probes} == {VLLM["ports"][0]["name"]}
    asked = re.findall(r"http://localhost:8000(/\w+)", " ".join(SERVICES["vllm"]["healthcheck"]["test"]))
    return {*asked, *(probe["path"] for probe in probes)}


class Recipe(NamedTuple):
    """How a file of docs/deploy starts a server. ``arguments``: behind ``vllm serve``. ``checked``:
    the variables with which ``kvdisk check`` runs first. ``patience_s``: from the request to stop
    until it is killed. ``memory``: what the server may take."""

    arguments: list[str]
    variables: dict[str, str]
    checked: dict[str, str] | None
    patience_s: float
    memory: str | None = None


def recipe_of_stack() -> Recipe:
    """Return the recipe of production-stack's values, whose chart adds the model and options."""
    (spec,) = STACK["servingEngineSpec"]["modelSpec"]
    assert {"kv_transfer_config", "lmcacheConfig"}.isdisjoint(spec), "the command line would win"
    variables, checked = listed(spec), listed(spec["initContainer"])
    own = spec["vllmConfig"]["extraArgs"]
    return Recipe([spec["modelURL"], *own], variables, checked, 30, spec["resources"]["limits"]["memory"])


def recipe_of_pod(pod: dict[str, Any], model: str | None = None) -> Recipe:
    (container,), (check,) = pod["containers"], pod["initContainers"]
    (script,) = [word for word in check["command"] if "kvdisk" in word]
    assert script == CHECK_COMMAND and check["image"] == container["image"]
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted <= {volume["name"] for volume in pod["volumes"]}
    own = [] if model is None else [model]
    return Recipe(
        own + container["args"],
        listed(container) if "envFrom" not in container else settings_of_kubernetes(container),
        listed(check) if "envFrom" not in check else settings_of_kubernetes(check),
        pod["terminationGracePeriodSeconds"],
        container["resources"]["limits"]["memory"],
    )


def recipe_of_systemd() -> Recipe:
    said = unit_of_systemd()
    (program, verb, *arguments) = shlex.split(said["ExecStart"][0])
    assert (Path(program).name, verb) == ("vllm", "serve")
    assert shlex.split(said["ExecStartPre"][0])[-1].replace("$$", "$").endswith(CHECK_COMMAND)
    variables = dict(pair.split("=", 1) for line in said["Environment"] for pair in shlex.split(line))
    return Recipe(arguments, variables, variables, float(said["TimeoutStopSec"][0]))


def recipe_of_skypilot() -> Recipe:
    check, serve = [line for line in SKYPILOT["run"].splitlines() if re.search("kvdisk|serve", line)]
    assert check == CHECK_COMMAND
    words = shlex.split(serve.replace("$MODEL", SKYPILOT["envs"]["MODEL"]))
    assert words[:3] == ["exec", "vllm", "serve"]
    return Recipe(words[3:], SKYPILOT["envs"], SKYPILOT["envs"], math.inf)


def unit_of_systemd() -> dict[str, list[str]]:
    """Return the settings of the service's section, each with all its values."""
    section = (DEPLOY / "vllm-kvdisk.service").read_text().partition("[Service]\n")[2].partition("\n[")[0]
    found: dict[str, list[str]] = {}
    for line in section.splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value)
    return found


RECIPES = {
    "kubernetes": recipe_of_pod(POD),
    "compose": Recipe(
        SERVICES["vllm"]["command"],
        SERVICES["vllm"]["environment"],
        None,
        int(SERVICES["vllm"]["stop_grace_period"].removesuffix("s")),
    ),
    "production-stack": recipe_of_stack(),
    "llm-d": recipe_of_pod(LLM_D["decode"], LLM_D["modelArtifacts"]["name"]),
    "kserve": recipe_of_pod(KSERVE_POD),
    "systemd": recipe_of_systemd(),
    "skypilot": recipe_of_skypilot(),
}


@pytest.mark.parametrize("where", RECIPES)
def test_vllm_and_kvdisk_take_what_a_file_gives_them(where, monkeypatch):
    recipe = RECIPES[where]
    taken = make_arg_parser(FlexibleArgumentParser()).parse_args(recipe.arguments)
    assert (taken.model_tag, taken.enable_prompt_tokens_details) == ("Qwen/Qwen3-8B", True)
    assert 0 < taken.shutdown_timeout <= recipe.patience_s / 2, "else vLLM kills the engine, or is killed"
    assert taken.kv_transfer_config is None and taken.kv_offloading_size is None, "the command line would win"
    ours = variables(recipe.variables)
    assert {name: parsed(name, text) for name, text in ours.items()} == {
        name: parsed(name, text) for name, text in SETTINGS.items()
    }
    assert recipe.checked is None or variables(recipe.checked) == ours, "kvdisk check looks at the same"
    transfer = transfer_of(recipe.variables)
    assert transfer is not None and transfer["kv_connector"] == "KVDiskConnector"
    config = Config.from_mapping(transfer["kv_connector_extra_config"])
    assert recipe.memory is None or config.cpu_bytes + OF_VLLM_BYTES <= size(recipe.memory)


def parsed(name: str, text: str) -> Any:
    key = name.removeprefix("KVDISK_").lower()
    return PARSERS[key](key, text)


def test_the_parts_of_the_manifest_find_each_other():
    labels = KUBERNETES["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert KUBERNETES["Deployment"]["spec"]["selector"]["matchLabels"] == labels
    assert KUBERNETES["Service"]["spec"]["selector"] == labels
    assert KUBERNETES["Service"]["spec"]["ports"][0]["targetPort"] == VLLM["ports"][0]["name"]
    assert f"--port={VLLM['ports'][0]['containerPort']}" in VLLM["args"]
    claim, volume = KUBERNETES["PersistentVolumeClaim"], KUBERNETES["PersistentVolume"]
    assert claim["spec"]["storageClassName"] == volume["spec"]["storageClassName"]
    assert claim["spec"]["storageClassName"] == KUBERNETES["StorageClass"]["metadata"]["name"]
    volumes = {one["name"]: one for one in POD["volumes"]}
    assert volumes["nvme"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    for container in (VLLM, CHECK):
        assert {mount["name"] for mount in container["volumeMounts"]} <= set(volumes)
    mounts = {mount["name"]: mount["mountPath"] for mount in [*VLLM["volumeMounts"], *CHECK["volumeMounts"]]}
    assert mounts["nvme"] == "/nvme"
    annotations = KUBERNETES["Deployment"]["spec"]["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/path"] == "/metrics"
    assert annotations["prometheus.io/port"] == str(VLLM["ports"][0]["containerPort"])


def size(text: str) -> int:
    """Read a size of Kubernetes, as kvdisk does."""
    return Config.from_mapping({"cpu_bytes": text}).cpu_bytes


def test_what_the_tiers_take_is_there():
    transfer = transfer_of(KUBERNETES["ConfigMap"]["data"])
    assert transfer is not None
    config = Config.from_mapping(transfer["kv_connector_extra_config"])
    assert config.cpu_bytes + OF_VLLM_BYTES <= size(VLLM["resources"]["limits"]["memory"])
    capacity = size(KUBERNETES["PersistentVolume"]["spec"]["capacity"]["storage"])
    assert config.nvme_bytes and config.nvme_bytes * 1.1 <= capacity, "a tenth is left free"
    assert size(KUBERNETES["PersistentVolumeClaim"]["spec"]["resources"]["requests"]["storage"]) <= capacity


# -- users -------------------------------------------------------------------------------------


def test_nothing_runs_as_root_or_may_become_it():
    pod = POD["securityContext"]
    assert pod["runAsNonRoot"] and f"{pod['runAsUser']}:{pod['runAsGroup']}" == dict(STEPS)["USER"] == "2000:0"
    for container in (VLLM, CHECK):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        }
    assert SERVICES["vllm"]["cap_drop"] == ["ALL"] and "user" not in SERVICES["vllm"], "it is the image's"
    published = [port for service in SERVICES.values() for port in service["ports"]]
    assert len(published) == 3 and all(port.startswith("127.0.0.1:") for port in published)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be other users")
def test_the_volume_serves_the_pods_user_over_restarts():
    """As the kubelet makes it, and makes it again at each mount where the root's mode is wrong."""
    pod = POD["securityContext"]
    around = Path(tempfile.mkdtemp())
    try:
        around.chmod(0o755)
        volume = around / "nvme"
        volume.mkdir()
        for _ in range(2):
            for path in (volume, *volume.rglob("*")):
                os.chown(path, -1, pod["fsGroup"])
                path.chmod(stat.S_IMODE(path.stat().st_mode) | (0o2770 if path.is_dir() else 0o660))
            with user(pod["runAsUser"], pod["fsGroup"], gid=pod["runAsGroup"]):
                check_directories(volume / "kv")
                assert Store.open(volume / "kv").path == volume / "kv"
            assert stat.S_IMODE((volume / "kv").stat().st_mode) == 0o700
    finally:
        shutil.rmtree(around)


# -- the image, and what runs beside it --------------------------------------------------------


def test_the_image_is_of_a_supported_vllm_and_has_what_a_wheel_is_made_of():
    version = re.search(r"^ARG VLLM_VERSION=v([\d.]+)$", DOCKERFILE, re.MULTILINE)
    assert version is not None and tuple(map(int, version[1].split(".")[:2])) in SUPPORTED_VERSIONS
    copied = [word for step, rest in STEPS if step == "COPY" for word in rest.split()[:-1]]
    assert sorted(copied) == sorted(make_wheel.PARTS)
    let_in = re.findall(r"^!(.*)$", (DEPLOY / "Dockerfile.dockerignore").read_text(), re.MULTILINE)
    assert sorted(let_in) == sorted(copied)
    build = SERVICES["vllm"]["build"]
    assert (DEPLOY / build["context"]).resolve() == ROOT and (ROOT / build["dockerfile"]).exists()
    assert {VLLM["image"], CHECK["image"], SERVICES["vllm"]["image"]} == {"vllm-kvdisk"}


def mounted(service: str) -> dict[str, Path]:
    """Return by path in the container what of the checkout is mounted there."""
    pairs = [one.split(":")[:2] for one in SERVICES[service]["volumes"] if one.startswith(".")]
    return {inside: (DEPLOY / outside).resolve() for outside, inside in pairs}


def test_prometheus_asks_vllm_and_grafana_shows_the_dashboard():
    settings = mounted("prometheus")["/etc/prometheus/prometheus.yml"]
    config = yaml.safe_load(settings.read_text())
    (job,), (rules,) = config["scrape_configs"], config["rule_files"]
    assert "groups" in yaml.safe_load(mounted("prometheus")[f"/etc/prometheus/{rules}"].read_text())
    assert (job["metrics_path"], job["static_configs"][0]["targets"]) == ("/metrics", ["vllm:8000"])
    assert "vllm" in SERVICES and "--port=8000" in SERVICES["vllm"]["command"]
    grafana = mounted("grafana")
    (source,) = yaml.safe_load(grafana["/etc/grafana/provisioning/datasources/kvdisk.yml"].read_text())["datasources"]
    assert (source["type"], source["url"], source["isDefault"]) == ("prometheus", "http://prometheus:9090", True)
    (board,) = yaml.safe_load(grafana["/etc/grafana/provisioning/dashboards/kvdisk.yml"].read_text())["providers"]
    boards = list(grafana[board["options"]["path"]].glob("*.json"))
    assert [json.loads(path.read_text())["uid"] for path in boards] == ["kvdisk"]
    home = SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert Path(home).name == boards[0].name and str(Path(home).parent) in grafana
    (variable,) = [
        one for one in json.loads(boards[0].read_text())["templating"]["list"] if one["name"] == "datasource"
    ]
    assert variable["query"] == source["type"]


@pytest.fixture(scope="module")
def linters(tmp_path_factory) -> Path:
    """The programs of requirements/deploy.txt, in an environment of their own."""
    place = tmp_path_factory.mktemp("deploy")
    constraints = place / "constraints.txt"
    constraints.write_text("\n".join(make_wheel.pins()))
    subprocess.run([sys.executable, "-m", "venv", place / "venv"], check=True)
    pip = [place / "venv/bin/python", "-m", "pip", "install", "--no-input", "--quiet", "--constraint", constraints]
    done = subprocess.run([*pip, "-r", ROOT / "requirements/deploy.txt"], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.fail(f"pip could not install what this test runs: {done.stderr.strip()[-300:]}", pytrace=False)
    return place / "venv/bin"


def run(*command: object, **more: Any) -> str:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False, **more)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.torture
@pytest.mark.timeout(1200)
def test_linters_find_nothing(linters, tmp_path):
    run(linters / "hadolint", DEPLOY / "Dockerfile")
    service = tmp_path / "kserve.yaml"
    pod = {key: KSERVE_POD[key] for key in OF_A_POD}
    service.write_text(yaml.safe_dump({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": pod}))
    for manifest in (DEPLOY / "kubernetes.yaml", service):
        run(linters / "kubernetes-validate", "--strict", "--quiet", manifest)
    compose = tmp_path / "compose.yaml"
    compose.write_text(interpolated((DEPLOY / "compose.yaml").read_text()))
    parse = "import sys, compose_spec as c; c.PyCompose.from_yaml(open(sys.argv[1]).read()).validate()"
    run(linters / "python", "-c", parse, compose)
    # And they do find something.
    for name, command, whole in (
        (
            "Dockerfile",
            [linters / "hadolint"],
            (DEPLOY / "Dockerfile").read_text().replace("COPY kvdisk", "ADD kvdisk"),
        ),
        (
            "kubernetes.yaml",
            [linters / "kubernetes-validate", "--strict"],
            (DEPLOY / "kubernetes.yaml").read_text().replace("readinessProbe", "readyProbe"),
        ),
        ("compose.yaml", [linters / "python", "-c", parse], compose.read_text().replace("shm_size", "shm_sizes")),
    ):
        (tmp_path / name).write_text(whole)
        done = subprocess.run([*command, tmp_path / name], capture_output=True, check=False)
        assert done.returncode != 0, name


CHART = {
    "Chart.yaml": "{apiVersion: v2, name: small, version: 0.1.0}",
    "values.schema.json": '{"type": "object", "required": ["pod"]}',
    "templates/engine.yaml": """
apiVersion: apps/v1
kind: Deployment
metadata: {name: {{ .Release.Name }}}
spec:
  selector: {matchLabels: {app: small}}
  template:
    metadata: {labels: {app: small}}
    spec: {{ toYaml .Values.pod | nindent 6 }}
""",
}
"""A chart of our own, as those of others are."""


@pytest.mark.torture
@pytest.mark.timeout(1200)
def test_what_a_chart_makes_of_values_is_checked(linters, tmp_path):
    """By the tool that one runs over the charts of others, which are not in this repository."""
    (tmp_path / "templates").mkdir()
    for name, text in CHART.items():
        (tmp_path / name).write_text(text)
    values = tmp_path / "values.yaml"
    tool = [linters / "python", ROOT / "tools" / "check_chart.py", tmp_path, values]
    pod = {key: LLM_D["decode"][key] for key in OF_A_POD if key in LLM_D["decode"]} | LLM_D["decode"]["extraConfig"]
    (vllm,) = pod["containers"]
    taken = ("name", "image", "args", "env", "ports", "resources", "volumeMounts")
    pod["containers"] = [{key: vllm[key] for key in taken} | vllm["extraConfig"]]
    values.write_text(yaml.safe_dump({"pod": pod}))
    said = run(*tool).splitlines()
    assert said == [" ".join(vllm["args"]), *(f"{one['name']}={one['value']}" for one in vllm["env"])]
    for change, why in (
        ({"args": [*vllm["args"], "--kv-transfer-config={}"]}, "--kv-transfer-config={} is given, and wins"),
        ({"args": []}, "--shutdown-timeout is missing"),
        ({"volumeMounts": []}, "/nvme/kv is on no claim"),
        ({"env": vllm["env"][:2]}, "kvdisk check does not run first with the same variables"),
        ({"securityContext": {"runAsNonRoot": False}}, "it may run as root"),
        ({"readyProbe": {}}, "readyProbe"),
        ({"env": []}, "0 pods have variables of kvdisk's, and not 1"),
    ):
        changed = pod | {"containers": [pod["containers"][0] | change]}
        values.write_text(yaml.safe_dump({"pod": changed}))
        done = subprocess.run(list(map(str, tool)), capture_output=True, text=True, check=False)
        assert done.returncode == 1 and why in done.stderr, (change, done.stderr)
    values.write_text("{}")
    done = subprocess.run(list(map(str, tool)), capture_output=True, text=True, check=False)
    assert done.returncode and "pod" in done.stderr, "the chart's own schema"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not here")
def test_systemd_takes_the_unit(tmp_path):
    """With programs that exist here in the place of those that it names."""
    unit = tmp_path / "vllm-kvdisk.service"
    for name in ("vllm", "kvdisk"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    text = (DEPLOY / unit.name).read_text().replace("/srv/vllm/bin/", f"{tmp_path}/").replace("User=vllm", "User=root")
    verify = ["systemd-analyze", "verify", "--man=no", str(unit)]
    for change, is_right in (("", True), ("KillMood=mixed\n", False)):
        unit.write_text(text.replace("KillMode=mixed\n", f"KillMode=mixed\n{change}"))
        done = subprocess.run(verify, capture_output=True, text=True, check=False)
        said = [line for line in done.stderr.splitlines() if unit.name in line]
        assert (not said) is is_right, done.stderr


@pytest.mark.parametrize("code", [0, 1, 2, 3])
def test_the_check_of_each_recipe_ends_a_start_where_an_engine_could_not(code, tmp_path):
    """As a shell runs it, with a ``kvdisk`` that ends with a code."""
    (tmp_path / "kvdisk").write_text(f"#!/bin/sh\nexit {code}\n")
    (tmp_path / "kvdisk").chmod(0o755)
    done = subprocess.run(["/bin/sh", "-c", CHECK_COMMAND], env={"PATH": f"{tmp_path}:/bin:/usr/bin"}, check=False)
    assert (done.returncode == 0) is (code <= 1)


def as_pip_is_configured() -> dict[str, str]:
    """Return what uv is to be told of this machine: pip may have it from its own files."""
    names = {"global.cert": "SSL_CERT_FILE", "global.index-url": "UV_DEFAULT_INDEX"}
    lines = [line.partition("=") for line in run(sys.executable, "-m", "pip", "config", "list").splitlines()]
    return {names[name]: value.strip("'") for name, _, value in lines if name in names}


@pytest.mark.torture
@pytest.mark.timeout(1200)
def test_the_steps_of_the_image_run(linters, tmp_path):
    """In an empty environment in the place of the image's Python, with the files of the COPY steps
    alone."""
    run(sys.executable, "-m", "venv", tmp_path / "venv")
    source = tmp_path / "tmp"
    for step, rest in STEPS:
        words = rest.split()
        if step == "COPY":
            to = tmp_path / words[-1].strip("/")
            for word in words[:-1]:
                if (ROOT / word).is_dir():
                    shutil.copytree(ROOT / word, to, ignore=shutil.ignore_patterns("__pycache__"))
                else:
                    to.mkdir(parents=True, exist_ok=True)
                    shutil.copy(ROOT / word, to)
        elif step == "RUN":
            assert rest.startswith("uv pip install --system ")
            here = rest.replace(" /tmp/", f" {source}/").replace("--system", f"--python {tmp_path / 'venv'}")
            path = os.pathsep.join([str(tmp_path / "venv/bin"), str(linters), os.environ["PATH"]])
            environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
            environment |= as_pip_is_configured()
            said = run("sh", "-ec", here, env=environment | {"PATH": path}, cwd=tmp_path)
            assert re.fullmatch(r"kvdisk \d+\.\d+\.\d+\n", said)
    assert not (source / "source").exists(), "nothing of the source is left in the image"
    run(tmp_path / "venv/bin/kvdisk", "--help", cwd=tmp_path)
