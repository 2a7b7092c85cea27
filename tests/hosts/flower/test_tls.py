# SPDX-License-Identifier: Apache-2.0
"""TLS and SuperNodes that prove who they are: telemetry comes home from all of them, strangers are refused.

And a machine that is gone is named: Flower itself says of it that «node 1», which is the SuperLink, has failed.
"""

import datetime as dt
import ipaddress
import re
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from cryptography.x509.oid import NameOID

from fedvitals.records import Finding
from fedvitals.store import open_reader
from fedvitals.store.read import queries
from fedvitals_studies.flower.app_folder import write_app
from support.conditions import holds_for_each
from support.flower.processes import SHORT, Certificates, Federation, SuperNode, deployed
from support.flower.records import SLOW, check_trace, cohorts, events_of, runs_of

pytestmark = pytest.mark.flower

AUTHORITY = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "an authority of the tests")])
SUPERLINK = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "a SuperLink of the tests")])
LOOPBACK = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
SAID = """

def _planted(config, partition, number, fault_of=fault_of):
    fault = fault_of(config, partition, number)
    print(f"round {number}: {fault}, pid {os.getpid()}", flush=True)
    return fault


fault_of = _planted
"""


def signed(
    subject: x509.Name, key: ec.EllipticCurvePrivateKey, by: ec.EllipticCurvePrivateKey
) -> x509.CertificateBuilder:
    now, hour = dt.datetime.now(dt.UTC), dt.timedelta(hours=1)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(AUTHORITY).public_key(key.public_key())
    builder = (
        builder.serial_number(x509.random_serial_number()).not_valid_before(now - hour).not_valid_after(now + hour)
    )
    constraint = x509.BasicConstraints(ca=key is by, path_length=None)
    builder = builder.add_extension(constraint, critical=True)
    return builder if key is by else builder.add_extension(LOOPBACK, critical=False)


def certificates(folder: Path) -> Certificates:
    """An authority, and a SuperLink that it vouches for on 127.0.0.1."""
    folder.mkdir()
    authority, own = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    made = Certificates(folder / "authority.pem", folder / "superlink.pem", folder / "superlink.key")
    for file, subject, key in ((made.authority, AUTHORITY, authority), (made.certificate, SUPERLINK, own)):
        certificate = signed(subject, key, authority).sign(authority, hashes.SHA256())
        file.write_bytes(certificate.public_bytes(Encoding.PEM))
    made.key.write_bytes(own.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return made


def registered(federation: Federation, count: int) -> tuple[list[str], list[list[object]]]:
    """New SuperNodes that the SuperLink knows: their ids, and the arguments by which they prove who they are."""
    files = [federation.folder / f"key-{i}" for i in range(count)]
    for file in files:
        key = ec.generate_private_key(ec.SECP384R1())
        file.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
        public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
        file.with_suffix(".pub").write_bytes(public)
    asked = [federation.flwr("supernode", "register", file.with_suffix(".pub"), "there") for file in files]
    assert [one.wait(SHORT) for one in asked] == [0] * count, asked[0].log()
    ids = [one.says(r"SuperNode (\d+) registered") for one in asked]
    return ids, [["--auth-supernode-private-key", file] for file in files]


def check_telemetry(store: Path, run: str, nodes: list[SuperNode]) -> None:
    """Of round 1, in which all was well: Spans, metrics and the partition that each node said it has."""
    everybody = {node.identity for node in nodes}
    assert cohorts(store, run)[1]["answered"] == everybody
    check_trace(store, run, nodes)
    with open_reader(store) as reader:
        table = queries.round_table(reader, run, 1)
    assert holds_for_each({"time.client", "update.norm", "update.samples"} <= set(table[node]) for node in everybody)
    told = {e.where.node: e.data["partition"] for e in events_of(store, run, "client.partition")}
    assert told == {node.identity: i for i, node in enumerate(nodes)}


def check_gone(store: Path, run: str, gone: SuperNode) -> None:
    (event,) = events_of(store, run, "client.dropped_out", "client.failed")
    assert (event.name, event.where.node) == ("client.dropped_out", gone.identity)
    assert (event.data["code"], event.data["round"]) == (5, 2)  # NODE_UNAVAILABLE
    assert gone.identity in cohorts(store, run)[2]["failed"]
    assert cohorts(store, run)[3]["asked"].isdisjoint({gone.identity})
    with open_reader(store) as reader:
        findings = [f for f in queries.records(reader, run, Finding) if f.issue == "DROP_OUT"]
    assert [(f.where.node, f.where.round) for f in findings] == [(gone.identity, 2), (gone.identity, 3)]


def test_telemetry_comes_home_over_tls_from_nodes_that_prove_who_they_are(tmp_path):
    app, store = write_app(tmp_path / "app", "two-lines"), tmp_path / "runs.db"
    with (app / "patient" / "faults.py").open("a") as file:
        file.write(SAID)
    with deployed(tmp_path, certificates=certificates(tmp_path / "tls"), authenticated=True) as federation:
        ids, proofs = registered(federation, 3)
        nodes = federation.add_nodes(3, *proofs)
        assert [node.identity for node in nodes] == ids
        stranger = federation.add_node("stranger")
        planted = {"fault": "timeout", "faulty": 2, "since": 2, "round_timeout": SLOW}  # asleep, and killed meanwhile
        run = federation.submit(app, store=store, num_server_rounds=3, fraction_evaluate=0.0, min_nodes=2, **planted)
        nodes[2].says(r"(round 2: timeout)", SLOW)
        nodes[2].kill()
        assert run.wait(SLOW) == 0, run.log()[-3000:]
        assert stranger.wait(SHORT) != 0
        assert re.search("must be registered", stranger.log()), stranger.log()
        (ours,) = runs_of(store)
        check_telemetry(store, ours, nodes)
        check_gone(store, ours, nodes[2])
    assert federation.marked() == []
