"""Pipeline files: what is refused, and on which line."""

from pathlib import Path

import pytest

from cli.plan import PIPELINE as SHIPPED
from gateway.pipeline.addresses import endpoints
from gateway.pipeline.config import Outputs, PipelineConfig, load_pipeline
from gateway.pipeline.kinds import KINDS
from gateway.yaml_source import YamlError

GOOD = """\
stages:
  a:
    kind: thinker
    address: 10.0.0.1:1
    sampling: {temperature: 0.5}
  b:
    kind: talker
    address: talker.local:2
    source: a
  c:
    kind: code2wav
    address: "[::1]:3"
    source: b
outputs:
  text: a
  speech: c
"""


@pytest.fixture
def load(tmp_path):
    def load_text(text: str, addresses=None):
        file = tmp_path / "p.yaml"
        file.write_text(text)
        return load_pipeline(file, addresses)

    return load_text


def test_the_shipped_file_is_valid():
    config = load_pipeline(SHIPPED)
    assert [stage.kind for stage in config.stages.values()] == ["thinker", "talker", "code2wav"]


def test_a_good_file(load):
    config = load(GOOD, {"b": "other:9"})
    assert config.thinker.sampling.temperature == 0.5
    assert config.answer == ["a", "b", "c"]
    assert config.talker.address == "other:9"


def test_replicas(load):
    text = "stages: {a: {kind: thinker, address: ['h:1', 'dns:///t.svc:2', '[::1]:3']}}\noutputs: {text: a}"
    found = endpoints(load(text).stages["a"].address)
    assert [(e.host, e.port, e.is_literal) for e in found] == [("h", 1, False), ("t.svc", 2, False), ("::1", 3, True)]


def test_text_only(load):
    config = load("stages: {a: {kind: thinker, address: 'h:1'}}\noutputs: {text: a}")
    assert config.talker is None


@pytest.mark.parametrize(
    ("old", "new", "line", "says"),
    [
        ("    source: a\n", "    source: a\n    sauce: x\n", 10, "stages.b.sauce: unknown key"),
        ("    source: a\n", "    sauce: a\n", 9, "stages.b.sauce: unknown key"),
        ("    source: a\n", "", 6, "stages.b.source: missing"),
        ("    source: a\n", "    source: z\n", 9, "no stage 'z'"),
        ("    source: a\n", "    source: c\n", 9, "a cycle (b -> c -> b)"),
        ("    source: a\n", "    source: b\n", 9, "a cycle (b -> b)"),
        ("    source: b\n", "    source: a\n", 13, "reads from a talker, but 'a' is a thinker"),
        ("kind: talker", "kind: singer", 6, "unknown stage kind 'singer'"),
        ("    kind: talker\n", "", 6, "stages.b.kind: missing"),
        ("10.0.0.1:1", "10.0.0.1", 4, "write host:port"),
        ("10.0.0.1:1", "10.0.0.1:0", 4, "write host:port"),
        ("10.0.0.1:1", "10.0.0.1:70000", 4, "write host:port"),
        ("10.0.0.1:1", "dns://thinker:1", 4, "'dns://thinker:1' is no address"),
        ("10.0.0.1:1", "[]", 4, "write host:port"),
        ("10.0.0.1:1", "['a:1', b]", 4, "'b' is no address"),
        ("10.0.0.1:1", "['a:1', 'a:1']", 4, "twice"),
        ("temperature: 0.5", "temperature: 5", 5, "stages.a.sampling.temperature"),
        ("temperature: 0.5", "temprature: 5", 5, "stages.a.sampling.temprature: unknown key"),
        ("  speech: c\n", "  speech: d\n", 16, "no stage 'd'"),
        ("  speech: c\n", "  speech: b\n", 16, "comes from a code2wav, but 'b' is a talker"),
        ("  speech: c\n", "  smell: c\n", 16, "outputs.smell: unknown key"),
        ("  speech: c\n", "", 6, "no output needs this stage"),
        ("  speech: c\n", "  audio: c\n", 16, "outputs.audio: comes from a dit, but 'c' is a code2wav"),
        ("  speech: c\n", "  audio: b\n", 16, "outputs.audio: comes from a dit, but 'b' is a talker"),
        ("  text: a\n", "", 15, "outputs.speech: needs outputs.text"),
        (
            "outputs:\n  text: a\n  speech: c\n",
            "outputs: {}\n",
            14,
            "outputs: name at least one of text, speech, ",
        ),
        ("  text: a\n", "  text: a\n  image: a\n", 16, "outputs.image: comes from a dit, but 'a' is a thinker"),
        ("kind: code2wav\n", "kind: dit\n", 13, "stages.c.source: a dit reads from an encoder, but 'b' is a talker"),
        ("kind: code2wav\n", "kind: encoder\n", 13, "stages.c.source: unknown key"),
        (
            "source: b\n",
            "source: b\n  e: {kind: encoder, address: 'h:5'}\n",
            14,
            "stages.e: no output needs this stage",
        ),
        ("  text: a\n", "  text: a\n  text: a\n", 16, "twice (first on line 15)"),
        ("outputs:", "modle: x\noutputs:", 14, "modle: unknown key"),
        ("    kind: talker\n", "    kind: [\n", 9, "not valid YAML"),
        (
            "    source: a\n",
            "    source: a\n    reads: codes\n",
            10,
            "stages.b.reads: Input should be 'states' or 'text'",
        ),
    ],
)
def test_faults_are_named_with_their_line(load, old, new, line, says):
    assert old in GOOD
    with pytest.raises(YamlError) as refused:
        load(GOOD.replace(old, new, 1))
    assert f"p.yaml:{line}: " in str(refused.value)
    assert says in str(refused.value)


def test_the_shipped_dit_file_is_valid():
    config = load_pipeline(SHIPPED.with_name("dit.yaml"))
    assert [stage.kind for stage in config.stages.values()] == ["dit"]
    assert (config.thinker, config.talker, config.model_stage(config.made[0])) == (None, None, "dit")


def test_every_shipped_file_is_valid():
    for file in SHIPPED.parent.glob("*.yaml"):
        assert load_pipeline(file).stages


def test_a_talker_that_reads_text_has_a_model_of_its_own(load):
    config = load(GOOD.replace("    source: a\n", "    source: a\n    reads: text\n"))
    assert (config.sources("b"), config.streams("b"), config.streams("c")) == (["a"], [], ["b"])
    assert config.answer == config.route("speech") == ["a", "b", "c"]
    assert (config.model_stage("text"), config.model_stage("speech"), config.speaks_text) == ("a", "b", True)
    assert load(GOOD).model_stage("speech") == "a"


def test_a_talker_that_reads_text_needs_a_source_for_it(load):
    text = (
        "stages:\n  b: {kind: talker, address: 'h:2', reads: text}\n  c: {kind: code2wav, address: 'h:3', source: b}\n"
    )
    with pytest.raises(YamlError, match=r"p.yaml:2: stages.b.reads: says what it takes of its source, and it has none"):
        load(text + "outputs: {speech: c}\n")


def test_a_dit_with_an_encoder(load):
    config = load(
        "stages: {e: {kind: encoder, address: 'h:1'}, d: {kind: dit, address: 'h:2', source: e}}\noutputs: {image: d}"
    )
    assert config.stages["d"].source == "e"


def test_a_thinker_and_a_dit(load):
    dit = "  d: {kind: dit, address: 'h:4'}\n"
    config = load(GOOD.replace("outputs:\n", f"{dit}outputs:\n  image: d\n"))
    assert config.outputs.image == "d"
    assert config.model_stage(config.made[0]) == "a"


def test_a_pipeline_that_begins_with_a_talker(load):
    config = load(
        "stages: {t: {kind: talker, address: 'h:1'}, c: {kind: code2wav, address: 'h:2', source: t}}\n"
        "outputs: {speech: c}"
    )
    assert config.answer == ["t", "c"]
    assert config.model_stage(config.made[0]) == "t"
    assert config.thinker is None


def test_the_table_of_kinds_is_that_of_the_pipeline_file():
    schema = PipelineConfig.model_json_schema()["properties"]["stages"]["additionalProperties"]
    assert schema["discriminator"]["mapping"].keys() == KINDS.keys()
    assert set(Outputs.model_fields) == {output for kind in KINDS.values() for output in kind.makes}
    assert {read for kind in KINDS.values() for read in kind.reads} <= KINDS.keys()


@pytest.mark.parametrize("text", ["", "[]", "stages: []\noutputs: {text: a}", "stages: {}\noutputs: {text: a}"])
def test_other_shapes_are_refused(load, text):
    with pytest.raises(YamlError, match=r"p\.yaml:1: "):
        load(text)


def test_an_address_for_an_unknown_stage_is_refused(load):
    with pytest.raises(YamlError, match="it has: a, b, c"):
        load(GOOD, {"x": "h:1"})


def test_a_missing_file_is_refused():
    with pytest.raises(YamlError, match="cannot be read"):
        load_pipeline(Path("/nonexistent.yaml"))
