"""deploy/docker/database.yaml and proxy.conf: several gateways behind a proxy, and the database that they share."""

import asyncio
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from sqlalchemy.engine import make_url

from gateway.settings import GatewaySettings
from tests.support.deployment.compose_files import ROOT, rendered

PROXY = (ROOT / "deploy/docker/proxy.conf").read_text()
OWN_URL = "QUARTET_GATEWAY_OWN_URL"
SECRET = "/run/secrets/database-password"


@pytest.mark.parametrize("files", [(), ("keys", "tls"), ("gpu", "webrtc")], ids="+".join)
def test_the_proxy_has_the_published_port(files):
    before = rendered({}, *files)["services"]["gateway"]
    services = rendered({}, *files, "database")["services"]
    assert "ports" not in services["gateway"]
    assert services["proxy"]["ports"] == before["ports"]
    assert set(services["proxy"]["networks"]) <= set(services["gateway"]["networks"])
    assert services["gateway"]["environment"].items() >= before["environment"].items()
    assert services["gateway"]["volumes"] == before["volumes"]  # of videos, too: all gateways have the same


@pytest.mark.parametrize("name", ["proxy", "database"])
def test_containers_beside_ours_are_hardened(name):
    service = rendered({}, "database")["services"][name]
    assert service["user"] == "10001:10001"  # to whom the password's file belongs
    assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"])
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["restart"] == "unless-stopped"
    assert set(service["deploy"]["resources"]["limits"]) == {"memory", "pids"}
    assert service["healthcheck"]["test"][0] == "CMD"


def test_gateways_alone_reach_the_database():
    config = rendered({}, "keys", "tls", "webrtc", "database")
    inside = {name for name, service in config["services"].items() if "database" in service.get("networks", ())}
    assert inside == {"gateway", "database"}
    assert config["networks"]["database"] == {"internal": True}
    assert "ports" not in config["services"]["database"]


def test_the_password_is_in_a_file_alone():
    config = rendered({"QUARTET_DATABASE_PASSWORD_FILE": "./mine"}, "database")
    assert config["secrets"]["database-password"] == {"file": "./mine"}
    gateway, database = config["services"]["gateway"], config["services"]["database"]
    url = make_url(gateway["environment"]["QUARTET_GATEWAY_DATABASE_URL"])
    assert (url.drivername, url.password) == ("postgresql", None)
    has = database["environment"]
    assert (url.host, url.username, url.database) == ("database", has["POSTGRES_USER"], has["POSTGRES_DB"])
    assert has["POSTGRES_PASSWORD_FILE"] == SECRET
    assert "database-password" in gateway["secrets"]
    assert database["secrets"] == ["database-password"]
    assert gateway["environment"]["QUARTET_GATEWAY_SIGNING_KEY_FILE"] == "/run/secrets/signing-key"
    assert "signing-key" in gateway["secrets"]
    shell, flag, script = gateway["command"]
    started = " ".join(rendered({})["services"]["gateway"]["command"])
    own_url = f"{OWN_URL}=${{{OWN_URL}:-http://$HOSTNAME:8000}}"
    assert (shell, flag, script) == ("sh", "-c", f"PGPASSWORD=$(cat {SECRET}) {own_url} exec {started}")


@pytest.mark.parametrize("given", [None, "http://gateway-1.internal:8000"])
def test_other_gateways_reach_a_container_by_its_id(given):
    """What the container's shell makes of the command: its environment has the setting only if .env has it."""
    service = rendered({"QUARTET_GATEWAY_OWN_URL": given} if given else {}, "database")["services"]["gateway"]
    told = service["environment"].get("QUARTET_GATEWAY_OWN_URL")
    assert told == given
    script = service["command"][2].replace("exec start.py python -m gateway", "exec env")
    environment = {"HOSTNAME": "0123456789ab", "PATH": os.environ["PATH"]} | ({} if told is None else {OWN_URL: told})
    said = subprocess.run(["sh", "-c", script], env=environment, capture_output=True, text=True, check=True).stdout
    (own_url,) = [line for line in said.splitlines() if line.startswith(f"{OWN_URL}=")]
    assert own_url == f"{OWN_URL}={given or 'http://0123456789ab:8000'}"


def test_gateways_wait_for_the_database():
    services = rendered({"GATEWAY_REPLICAS": "5"}, "database")["services"]
    needs = services["gateway"]["depends_on"]
    assert needs.pop("database") == {"condition": "service_healthy"}
    assert needs == rendered({})["services"]["gateway"]["depends_on"]
    assert services["gateway"]["deploy"]["replicas"] == "5"
    assert rendered({}, "database")["services"]["gateway"]["deploy"]["replicas"] == "2"


def test_the_proxy_waits_longer_than_a_gateway():
    fields = GatewaySettings.model_fields
    longest_s = max(fields[name].default for name in ("request_timeout_s", "realtime_idle_s"))
    for name in ("proxy_read_timeout", "proxy_send_timeout", "client_body_timeout", "send_timeout"):
        assert int(re.findall(rf"^ *{name} (\d+)s;", PROXY, re.MULTILINE)[0]) > longest_s
    assert "client_max_body_size 0;" in PROXY  # the gateway's own limit


@pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed")
async def test_nginx_takes_the_proxys_configuration(tmp_path: Path):
    file = tmp_path / "proxy.conf"
    file.write_text(PROXY.replace("/tmp/", f"{tmp_path}/"))
    command = ("nginx", "-t", "-e", "stderr", "-c", str(file))
    nginx = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    _, said = await nginx.communicate()
    assert nginx.returncode == 0, said.decode()
