# SPDX-License-Identifier: Apache-2.0
"""What a Helm chart of others makes of values of docs/deploy: whether the pod with vLLM has the
variables, the drive and the check, and nothing on the command line that wins over them.

``git clone`` the chart first; nothing is installed, and no cluster is asked. It needs what
requirements/deploy.txt lists, in an environment of its own.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PREFIX = "KVDISK_"
WINNERS = ("--kv-transfer-config", "--kv-offloading-size")
RELEASE = "kvdisk"
"""Of such a name Kubernetes makes variables that begin with PREFIX, too."""


def rendered(chart: Path, values: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the objects that a chart makes of values. Raises whatever Helm's library does."""
    import yaml
    from helm_python.chart import Chart

    opened = Chart.load(chart)
    opened.validate_schema(values)
    found = opened.render(values, name=RELEASE, namespace="default")
    return [one for text in found.values() for one in yaml.safe_load_all(text) if one]


def wrong_by_schema(one: dict[str, Any]) -> Iterator[str]:
    """Yield what Kubernetes would refuse of an object; nothing of kinds that are not its own."""
    import kubernetes_validate as kubernetes

    try:
        kubernetes.validate(one, kubernetes.latest_version(), strict=True)
    except kubernetes.SchemaNotFoundError:
        return
    except kubernetes.ValidationError as error:
        yield f"{one['kind']} {one['metadata']['name']}: {error.message}"


def variables(container: dict[str, Any]) -> dict[str, str]:
    """Return kvdisk's variables of a container."""
    return {one["name"]: one["value"] for one in container.get("env", ()) if one["name"].startswith(PREFIX)}


def wrong_with(pod: dict[str, Any]) -> Iterator[str]:
    """Yield what is missing in a pod whose only container with variables is vLLM's."""
    (vllm,) = [one for one in pod["containers"] if variables(one)]
    words = [*vllm.get("command", ()), *vllm.get("args", ())]
    yield from (f"{word} is given, and wins over the variables" for word in words if word.startswith(WINNERS))
    if not any(word.startswith("--shutdown-timeout") for word in words):
        yield "--shutdown-timeout is missing: vLLM would kill its engines at once"
    mounts = {mount["mountPath"]: mount["name"] for mount in vllm.get("volumeMounts", ())}
    store = variables(vllm)[f"{PREFIX}STORE_DIRS"]
    claimed = [name for path, name in mounts.items() if Path(store).is_relative_to(path)]
    volumes = {volume["name"]: volume for volume in pod.get("volumes", ())}
    if not any("persistentVolumeClaim" in volumes.get(name, {}) for name in claimed):
        yield f"{store} is on no claim, and so in the container"
    checks = [one for one in pod.get("initContainers", ()) if "kvdisk check" in json.dumps(one)]
    if [variables(one) for one in checks] != [variables(vllm)]:
        yield "kvdisk check does not run first with the same variables"
    settings = [pod.get("securityContext", {}) | one.get("securityContext", {}) for one in (vllm, *checks)]
    if not all(one.get("runAsNonRoot") and one.get("fsGroup") for one in settings):
        yield "it may run as root, or has no group of its own on the volume"


def main() -> int:
    """Print the command and the variables of vLLM's pod; return 1 where something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("chart", type=Path, help="the chart's directory, with its Chart.yaml")
    parser.add_argument("values", type=Path, help="such as docs/deploy/llm-d.yaml")
    options = parser.parse_args()
    import yaml

    objects = rendered(options.chart, yaml.safe_load(options.values.read_text()))
    wrong = [said for one in objects for said in wrong_by_schema(one)]
    pods = [one["spec"]["template"]["spec"] for one in objects if "template" in one.get("spec", {})]
    ours = [pod for pod in pods if any(variables(container) for container in pod["containers"])]
    if len(ours) != 1:
        wrong.append(f"{len(ours)} pods have variables of kvdisk's, and not 1")
    for pod in ours:
        wrong += wrong_with(pod)
        (vllm,) = [one for one in pod["containers"] if variables(one)]
        print(" ".join([*vllm.get("command", ()), *vllm.get("args", ())]))
        print("\n".join(f"{name}={value}" for name, value in variables(vllm).items()))
    for said in wrong:
        print(f"kvdisk: {said}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
