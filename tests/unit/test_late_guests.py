# SPDX-License-Identifier: Apache-2.0
"""Who waits for the drive when the weights' identity comes after the start."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

from kvdisk import late_identity
from kvdisk.late_identity import LateIdentity
from kvdisk.mailbox import Mailbox

NAMED = SimpleNamespace(fingerprint=b"f" * 32, description={})


def test_a_step_does_not_look_at_the_drive_for_guests(monkeypatch):
    """A drive that hangs there holds up the thread that looks, and no step."""
    hangs, sent, mailbox = threading.Event(), list[Any](), Mailbox()
    monkeypatch.setattr(late_identity, "guests_of", lambda *_: hangs.wait(60) and "guests")
    home = SimpleNamespace(id="h", fingerprint=NAMED.fingerprint, name=lambda *_: None)
    store: Any = SimpleNamespace(home=home, nvme=SimpleNamespace(identify=sent.append))
    parts: Any = SimpleNamespace(geometry=SimpleNamespace(rank_count=2))
    manager: Any = SimpleNamespace(identify=lambda _: None)
    identity: Any = SimpleNamespace(wait=lambda _: NAMED)
    looks = threading.Thread(target=LateIdentity(identity, parts, manager, store, mailbox).look)
    looks.start()
    assert not mailbox.work(), "nothing is a step's before the drive has answered"
    hangs.set()
    looks.join()
    monkeypatch.setattr(late_identity, "guests_of", None)
    assert mailbox.work() and [each.guests for each in sent] == ["guests"]
