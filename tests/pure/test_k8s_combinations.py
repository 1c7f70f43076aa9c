"""deploy/k8s: each component beside each other one, on each overlay, in either order: it works, or is refused by name.

README's table of components says which, and is compared with what is found here.
"""

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest
import yaml

from tests.support.documents import commands
from tests.support.k8s.checks import problems
from tests.support.k8s.kustomize import build, copy_deployment, with_components
from tests.support.k8s.objects import ROOT, Cluster, Object, pod_of, stages_of
from tests.support.k8s.pool import pool_problems, split

K8S = ROOT / "deploy/k8s"
OVERLAYS = ("cpu-demo", "single-gpu", "speech", "scaled")
COMPONENTS = sorted(each.name for each in (K8S / "components").iterdir())
CHOICES = ("dit", "text", "text-dit", "speech", "llm-tts", "asr-llm-tts", "embeddings")  # each of a pipeline
HAS, WORKS, REFUSED = "has it", "works", "not offered"
OWN = {  # which a component must set, whatever is set beside it
    f"QUARTET_GATEWAY_{setting}" for setting in ("STAGE", "API_KEYS_FILE", "SIGNING_KEY_FILE", "ALIGNER", "WEBRTC")
}


def parts(directory: Path) -> Iterator[str]:
    """The components that a kustomization adds, itself or by its parts."""
    spec = yaml.safe_load((directory / "kustomization.yaml").read_text())
    for name in spec.get("components", []):
        yield Path(name).name
    for name in [*spec.get("resources", []), *spec.get("components", [])]:
        if (directory / name / "kustomization.yaml").is_file():
            yield from parts(directory / name)


def found_wrong(objects: list[Object]) -> list[str]:
    """All that is wrong with a combination."""
    own, of_pool = split(objects)
    found = problems(own) + (pool_problems(objects) if of_pool else [])
    cluster = Cluster(own)
    shared = cluster.named("PersistentVolumeClaim", "models")
    if shared is None or shared["spec"]["accessModes"] == ["ReadWriteMany"]:
        return found
    for stage in stages_of(cluster):  # one node, whose GPU has no slice left for a second pod
        deployment = cluster.get("Deployment", stage)
        if "nvidia.com/gpu" in str(deployment) and deployment["spec"]["strategy"] != {"type": "Recreate"}:
            found.append(f"Deployment {stage}: a rollout waits for a GPU")
    return found


def outcome(folder: Path, overlay: str, components: list[str], **more: object) -> str:
    """Whether it works, or is refused; nothing else may be."""
    try:
        objects = build(with_components(folder, overlay, components, **more))
    except ValueError:
        return REFUSED
    assert found_wrong(objects) == [], (overlay, components)
    return WORKS


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], str]:
    """By overlay and component."""
    folder, found = tmp_path_factory.mktemp("alone"), {}
    for overlay, component in itertools.product(OVERLAYS, COMPONENTS):
        is_there = component in set(parts(K8S / "overlays" / overlay))
        found[overlay, component] = HAS if is_there else outcome(folder, overlay, [component])
    return found


@pytest.fixture(scope="session")
def refused(alone: dict[tuple[str, str], str], tmp_path_factory: pytest.TempPathFactory) -> set[tuple[str, str]]:
    """The pairs that are refused in this order, though each works alone; it is the same on all overlays."""
    folder, found = tmp_path_factory.mktemp("pairs"), dict[tuple[str, str], set[str]]()
    for overlay in OVERLAYS:
        added = [component for component in COMPONENTS if alone[overlay, component] == WORKS]
        for first, second in itertools.permutations(added, 2):
            found.setdefault((first, second), set()).add(outcome(folder, overlay, [first, second]))
    assert {pair: each for pair, each in found.items() if len(each) > 1} == {}
    return {pair for pair, (each,) in found.items() if each == REFUSED}


def test_the_readme_says_what_goes_with_what(alone, refused) -> None:
    rows = [f"| component | {' | '.join(f'`{overlay}`' for overlay in OVERLAYS)} | not beside |", "|---" * 6 + "|"]
    for component in COMPONENTS:
        others = [name for name in COMPONENTS if (component, name) in refused and (name, component) in refused]
        told = [f"`{name}`" for name in others]
        told += [f"`{name}` after it" for name in COMPONENTS if (component, name) in refused and name not in others]
        cells = [alone[overlay, component] for overlay in OVERLAYS]
        rows.append(f"| `{component}` | {' | '.join(cells)} | {', '.join(told)} |")
    assert "\n".join(rows) in (K8S / "README.md").read_text()


def test_refused_is_what_cannot_work(alone, refused) -> None:
    assert {pair for pair, found in alone.items() if found == REFUSED} == {
        *(
            ("cpu-demo", name) for name in ("dit", "text-dit", "asr-llm-tts", "embeddings")
        ),  # no volume for their weights
        *(("speech", name) for name in ("dit", "text", "text-dit", "llm-tts", "asr-llm-tts", "embeddings", "webrtc")),
        *(("scaled", name) for name in ("text", "text-dit", "speech", "state", "llm-tts", "asr-llm-tts", "embeddings")),
    }
    both_ways = {frozenset(pair) for pair in refused if pair[::-1] in refused}
    assert both_ways == {frozenset(pair) for pair in itertools.combinations(CHOICES, 2)} | {
        *(frozenset({"ucx", other}) for other in ("tls", "embeddings")),
        *(frozenset({"webrtc", other}) for other in ("speech", "embeddings")),
        frozenset({"aligner", "embeddings"}),
        frozenset({"state", "database"}),
    }
    changed = ("dit", "text-dit", "asr-llm-tts", "embeddings", "aligner")  # by tls, behind them
    assert {pair for pair in refused if pair[::-1] not in refused} == {("tls", name) for name in changed}


@pytest.mark.long
@pytest.mark.parametrize("overlay", ["single-gpu", "scaled"])
def test_no_three_do_what_two_do_not(alone, refused, tmp_path: Path, overlay: str) -> None:
    added = [component for component in COMPONENTS if alone[overlay, component] == WORKS]
    for three in itertools.permutations(added, 3):
        is_refused = any(pair in refused for pair in itertools.combinations(three, 2))
        assert outcome(tmp_path, overlay, list(three)) == (REFUSED if is_refused else WORKS), three


@pytest.mark.parametrize("overlay", OVERLAYS)
@pytest.mark.parametrize("namespace", ["", "elsewhere"])
def test_an_own_overlay_is_whole_in_whatever_namespace(alone, tmp_path: Path, overlay: str, namespace: str) -> None:
    left_out = ("database", "text", "text-dit", "speech", "llm-tts", "asr-llm-tts", "embeddings", "tls")
    added = [name for name in COMPONENTS if alone[overlay, name] == WORKS and name not in left_out]
    given = {"namespace": namespace} if namespace else {}
    objects = build(with_components(tmp_path, overlay, [*added, "tls"] if "ucx" not in added else added, **given))
    assert found_wrong(objects) == []
    spaces = {each["metadata"]["namespace" if each["kind"] != "Namespace" else "name"] for each in objects}
    assert spaces == {namespace or "quartet"}


def test_settings_beside_a_component_arrive(alone, tmp_path: Path) -> None:
    """kustomize applies a component after the settings of the same file: it may change those that are its own alone."""
    settings = {"model": ["OMP_NUM_THREADS=7", "QUARTET_DIT_MODEL=/models/own", "QUARTET_DIT_MAX_RUNNING_REQUESTS=3"]}
    for component in COMPONENTS:
        spec = yaml.safe_load((K8S / "components" / component / "kustomization.yaml").read_text())
        for generator in spec.get("configMapGenerator", []):
            names = {each.partition("=")[0] for each in generator.get("literals", [])}
            assert generator.get("behavior") != "merge" or names <= OWN, component
    own = [{"name": name, "behavior": "merge", "literals": each} for name, each in settings.items()]
    folder = with_components(tmp_path, "single-gpu", ["dit"], configMapGenerator=own)
    environment = Cluster(build(folder)).environment("dit")
    assert (environment["QUARTET_DIT_MODEL"], environment["QUARTET_DIT_MAX_RUNNING_REQUESTS"]) == ("/models/own", "3")
    assert environment["OMP_NUM_THREADS"] == "7"


def test_rollouts_of_what_is_shared(tmp_path: Path) -> None:
    """A dit waits for no second GPU where there is one; what the gateway keeps has one gateway."""
    dit = Cluster(build(with_components(tmp_path, "single-gpu", ["dit"]))).get("Deployment", "dit")
    assert dit["spec"]["strategy"] == {"type": "Recreate"}
    scaled = Cluster(build(K8S / "overlays/scaled")).get("Deployment", "dit")
    assert scaled["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
    gateway = Cluster(build(with_components(tmp_path, "single-gpu", ["state"]))).get("Deployment", "gateway")
    assert (gateway["spec"]["strategy"], gateway["spec"]["replicas"]) == ({"type": "Recreate"}, 1)
    claims = [volume for volume in pod_of(gateway)["volumes"] if "persistentVolumeClaim" in volume]
    assert claims == [{"name": "jobs", "persistentVolumeClaim": {"claimName": "state"}}]


@pytest.mark.parametrize(("component", "gone"), [("text", {"talker", "code2wav"}), ("speech", {"thinker"})])
def test_the_readme_removes_what_apply_leaves(tmp_path: Path, component: str, gone: set[str]) -> None:
    before, after = build(K8S / "overlays/cpu-demo"), build(with_components(tmp_path, "cpu-demo", [component]))
    lines = [each.text for each in commands() if each.words[:4] == ("kubectl", "-n", "quartet", "delete")]
    selected = [
        set(re.split(", *", match[1])) for line in lines if (match := re.search(r"component in \((.*)\)", line))
    ]
    assert gone in selected
    (kinds,) = {match[1] for line in lines if (match := re.search(r"delete ([a-z,]+) -l", line))}
    assert set(kinds.split(",")) == {"deployment", "service", "poddisruptionbudget", "networkpolicy"}

    def of_them(objects: list[Object]) -> set[tuple[str, str]]:
        labelled = ((each, each["metadata"].get("labels", {})) for each in objects)
        return {_name(each) for each, labels in labelled if labels.get("app.kubernetes.io/component") in gone}

    assert of_them(after) == set()
    running = {_name(each) for each in before if each["kind"] in ("Deployment", "Service", "PodDisruptionBudget")}
    assert running - {_name(each) for each in after} <= of_them(before)


def _name(each: Object) -> tuple[str, str]:
    return each["kind"], each["metadata"]["name"]


def test_scaled_without_its_diffusion_stage_may_be_of_text_or_speech(tmp_path: Path) -> None:
    """By its own comment: the component is left out, and the autoscaler."""
    source = K8S / "overlays/scaled"
    spec = yaml.safe_load((source / "kustomization.yaml").read_text())
    for component in ("", "text", "speech"):
        folder = tmp_path / (component or "all")
        folder.mkdir()
        scalers = yaml.safe_load_all((source / "autoscaling.yaml").read_text())
        kept = [each for each in scalers if each["metadata"]["name"] != "dit"]
        (folder / "autoscaling.yaml").write_text(yaml.safe_dump_all(kept))
        with_components(folder, "scaled", [component] if component else [])
        k8s = yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"][0].removesuffix(
            "/overlays/scaled"
        )
        added = [name.replace("../..", k8s) for name in spec["components"] if not name.endswith("/dit")]
        added += [f"{k8s}/components/{component}"] if component else []
        if component == "speech":  # of a stage that is not there nothing is set
            spec["configMapGenerator"] = [each for each in spec["configMapGenerator"] if "thinker" not in each["name"]]
        own = {**spec, "resources": [f"{k8s}/base", "autoscaling.yaml"], "components": added}
        (folder / "kustomization.yaml").write_text(yaml.safe_dump(own))
        assert found_wrong(build(folder)) == [], component


def test_the_overlay_of_a_thinker_on_two_gpus_is_one(tmp_path: Path) -> None:
    found = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/scaling.md").read_text(), re.DOTALL)
    (example,) = (each for each in found if "TENSOR_PARALLEL" in each)
    copy_deployment(tmp_path)
    folder = tmp_path / "deploy/k8s/overlays/mine"
    folder.mkdir()
    (folder / "kustomization.yaml").write_text(example)
    objects = build(folder)
    assert found_wrong(objects) == []
    assert Cluster(objects).settings("thinker").tensor_parallel_size == 2


def test_the_readmes_own_overlay_is_one(tmp_path: Path) -> None:
    example, _ = re.findall(r"```yaml\n(.*?)```", (K8S / "README.md").read_text(), re.DOTALL)
    given = yaml.safe_load(example)
    given["images"] = []  # of a registry, whose names the checks do not know
    folder = with_components(tmp_path, "single-gpu", ["dit"])
    paths = yaml.safe_load((folder / "kustomization.yaml").read_text())
    assert [Path(name).name for name in given["resources"] + given["components"]] == ["single-gpu", "dit"]
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(given | paths))
    objects = build(folder)
    assert found_wrong(objects) == []
    assert Cluster(objects).environment("dit")["QUARTET_DIT_MODEL"] == "Qwen/Qwen-Image-Edit"


@pytest.mark.parametrize("model", ["nvidia/Cosmos3-Nano", "ByteDance-Seed/BAGEL-7B-MoT"])
def test_the_readmes_overlay_of_one_checkpoint_is_one(tmp_path: Path, model: str) -> None:
    text = (K8S / "README.md").read_text()
    _, example = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    given = yaml.safe_load(dedent(example).replace("nvidia/Cosmos3-Nano", model))
    folder = with_components(tmp_path, "single-gpu", ["text-dit"])
    paths = yaml.safe_load((folder / "kustomization.yaml").read_text())
    assert [Path(name).name for name in given["components"]] == ["text-dit"]
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(given | paths))
    objects = build(folder)
    assert found_wrong(objects) == []
    cluster = Cluster(objects)
    assert [cluster.settings(stage).model for stage in stages_of(cluster)] == [model, model]
