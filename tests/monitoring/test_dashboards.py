"""The dashboards' JSON: up to date, complete, and what Grafana's schema allows."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from monitoring.dashboards import FOLDER, dashboards, panels, text_of
from monitoring.dashboards.frame import frame, in_rows, row
from monitoring.dashboards.typescript import typescript
from monitoring.panel_queries import panel_queries

MONITORING = FOLDER.parent.parent
BOARDS = dashboards()
PANELS = [
    pytest.param(panel, id=f"{uid}: {panel['title']}")
    for uid, board in BOARDS.items()
    for panel in board["panels"]
]


@pytest.mark.parametrize("uid", sorted(BOARDS))
def test_the_json_is_what_the_code_makes(uid: str) -> None:
    assert (FOLDER / f"{uid}.json").read_text(encoding="utf-8") == text_of(BOARDS[uid])


def test_no_other_json_is_provisioned() -> None:
    assert {file.stem for file in FOLDER.glob("*.json")} == set(BOARDS)


@pytest.mark.parametrize("panel", PANELS)
def test_every_panel_has_a_description_a_unit_thresholds_and_a_text_for_no_data(
    panel: dict[str, Any],
) -> None:
    defaults = panel["fieldConfig"]["defaults"]
    assert len(panel["description"]) > 20
    assert defaults["unit"]
    assert defaults["thresholds"]["steps"]
    assert defaults["noValue"]
    assert panel["targets"]
    assert all(target["datasource"]["uid"] == "${datasource}" for target in panel["targets"])


@pytest.mark.parametrize("uid", sorted(BOARDS))
def test_panels_fill_the_grid_without_overlapping(uid: str) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in BOARDS[uid]["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not taken & cells, panel["title"]
        taken |= cells
    rows = {y for _, y in taken}
    assert taken == {(x, y) for x in range(24) for y in range(max(rows) + 1)}


@pytest.mark.parametrize("uid", sorted(BOARDS))
def test_variables_and_load_annotations(uid: str) -> None:
    board = BOARDS[uid]
    names = {variable["name"] for variable in board["templating"]["list"]}
    assert {"datasource", "arm", "model", "rank"} <= names
    (annotation,) = board["annotations"]["list"]
    assert "hiqcache_load_running" in annotation["target"]["expr"]
    assert annotation["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


@pytest.mark.parametrize("uid", sorted(BOARDS))
def test_queries_parse(uid: str) -> None:
    for query in panel_queries(BOARDS[uid]):
        promql_parser.parse(query.expression)


def test_provisioning_names_the_folder_and_one_data_source() -> None:
    provisioning = MONITORING / "grafana" / "provisioning"
    sources = yaml.safe_load((provisioning / "datasources" / "prometheus.yml").read_text())
    assert [source["type"] for source in sources["datasources"]] == ["prometheus"]
    providers = yaml.safe_load((provisioning / "dashboards" / "hiqcache.yml").read_text())
    assert [provider["folder"] for provider in providers["providers"]] == ["HiQCache"]


@pytest.mark.monitoring
def test_grafana_s_schema_accepts_every_field(tmp_path: Path) -> None:
    modules = MONITORING / "node_modules"
    assert modules.is_dir(), "run npm ci in monitoring/"
    (tmp_path / "node_modules").symlink_to(modules)
    (tmp_path / "dashboards.ts").write_text(typescript(BOARDS), encoding="utf-8")
    flags = ["--strict", "--noEmit", "--skipLibCheck", "--target", "es2022", "--module", "esnext"]
    checked = subprocess.run(
        ["node_modules/.bin/tsc", *flags, "--moduleResolution", "bundler", "dashboards.ts"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert checked.returncode == 0, checked.stdout[-4000:]


def test_panels_of_a_row_share_its_width() -> None:
    board = in_rows(
        frame("uid", "title", "text"),
        row(4, *(panels.lines(name, "", [("up", "")], "none") for name in "abc")),
        row(7, panels.lines("d", "", [("up", "")], "none")),
    ).build()
    places = [panel.grid_pos for panel in board.panels or ()]
    assert [(place.x, place.y, place.w, place.h) for place in places if place] == [
        *((0, 0, 8, 4), (8, 0, 8, 4), (16, 0, 8, 4)),
        (0, 4, 24, 7),
    ]
    with pytest.raises(ValueError, match="5 panels do not share 24 columns"):
        row(4, *(panels.lines(name, "", [("up", "")], "none") for name in "abcde"))
