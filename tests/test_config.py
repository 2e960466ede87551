"""Configurations: what reads, what is refused and with which words, what the echo gives back."""

import dataclasses
import os
import re
import tomllib
from pathlib import Path

import pytest

from dustmap import config
from dustmap.config import Config
from dustmap.errors import UserError

Tables = dict[str, dict[str, object]]


TABLE = {"catalog": "table.csv"}


def tables(**sections: dict[str, object]) -> Tables:
    return {"data": {"catalog": "stars.fits"}, **sections}


def read(*overrides: str, **sections: dict[str, object]) -> Config:
    return config.from_mapping(tables(**sections), overrides)


def refusal(*overrides: str, **sections: dict[str, object]) -> str:
    with pytest.raises(UserError) as caught:
        read(*overrides, **sections)
    return str(caught.value)


def test_the_example_is_the_default_configuration() -> None:
    assert config.from_mapping(tomllib.loads(config.example())) == read()


def test_the_example_explains_every_key_and_its_unit() -> None:
    lines = config.example().splitlines()
    for section in dataclasses.fields(Config):
        for field in dataclasses.fields(getattr(read(), section.name)):
            starts = (f"{field.name} = ", f"[{section.name}.{field.name}]")
            at = next(i for i, line in enumerate(lines) if line.startswith(starts))
            assert lines[at - 1].startswith("#")
    assert lines[lines.index("spacing = 20.0") - 1].endswith("[pc]")
    assert lines[lines.index("mean_density = 0.001") - 1].endswith("[mag/pc]")
    assert lines[lines.index("parallax_zero_point = 0.0") - 1].endswith("[mas]")


def test_the_echo_reads_back_as_the_same_configuration() -> None:
    written = ("grid.size=[0.3kpc, 200pc, 100]", "fit.seed=7", 'data.system=A "G"\u00b5')
    resolved = read(*written, "data.columns.l=GLON", 'data.columns.a b="x = [0]"')
    assert config.from_mapping(tomllib.loads(config.echo(resolved))) == resolved
    assert config.sha256(resolved) in config.echo(resolved).splitlines()[0]


def test_the_hash_follows_values_and_not_how_they_are_written() -> None:
    assert config.sha256(read(grid={"spacing": "0.01kpc"})) == config.sha256(
        read(grid={"spacing": 10})
    )
    assert config.sha256(read(grid={"spacing": 10})) != config.sha256(read())


@pytest.mark.parametrize(
    ("written", "pc"),
    [("300pc", 300.0), ("0.3kpc", 300.0), ("3e2 pc", 300.0), ("300", 300.0), (300, 300.0)],
)
def test_lengths_accept_units(written: object, pc: float) -> None:
    assert read(model={"length": written}).model.length == pc


@pytest.mark.parametrize(
    "written", ["300ly", "pc", "1.2.3pc", -1, 0, True, [1], float("nan"), float("inf"), "-3pc"]
)
def test_lengths_refuse_what_is_none(written: object) -> None:
    message = refusal(model={"length": written})
    assert message.startswith(f"model.length = {written!r}: expected a positive length")
    assert '"0.3kpc"' in message


@pytest.mark.parametrize(
    ("section", "values", "words"),
    [
        ("data", {"catalog": 3}, "data.catalog = 3: expected a text"),
        ("data", {"catalog": []}, "data.catalog is missing"),
        ("data", {"catalog": "s.fits", "holdout": 1.0}, "data.holdout = 1.0: expected a number"),
        ("data", {"catalog": "s.fits", "kind": "galaxies"}, '"stars", "regression"'),
        ("grid", {"center": [0, 0, 0, 0]}, "expected a list of 1 or 2 or 3 lengths"),
        ("grid", {"center": [0, 0]}, "expected 3 lengths"),
        ("grid", {"size": [100, 100, 50]}, "pc, such as [100, 100, 40]"),
        ("grid", {"outside": "ignore"}, '"truncate", "drop", "error"'),
        ("model", {"density": "uniform"}, '"auto", "lognormal", "gaussian"'),
        ("model", {"mean": "bulge"}, '"constant", "disc"'),
        ("model", {"scatter": -0.1}, "model.scatter = -0.1: expected a number >= 0 (unit: mag)"),
        (
            "model",
            {"relative_scatter": 0.1, "density": "gaussian"},
            "model.relative_scatter, given or in model.learn, is for a log-normal density",
        ),
        (
            "model",
            {"learn": ["relative_scatter"], "density": "gaussian"},
            "model.relative_scatter, given or in model.learn, is for a log-normal density",
        ),
        ("model", {"disc_height": "100mas"}, "model.disc_height = '100mas': expected a positive"),
        ("data", {"catalog": "s.fits", "invalid": "keep"}, '"", "error", "drop"'),
        ("data", {"catalog": "s.fits", "distance_prior": "1/x"}, '"exponential-density", '),
        ("fit", {"distance_rounds": 4}, "expected a whole number >= 0 and <= 3"),
        ("export", {"quantities": ["mode"]}, '"mean", "std", "median", "p16", "p84", "coverage"'),
        ("export", {"samples": -1}, "expected a whole number >= 0"),
        ("model", {"noise": "cauchy"}, '"auto", "gaussian", "student-t"'),
        ("model", {"std": -1}, "model.std = -1: expected a number >= 0"),
        ("model", {"learn": ["length", "length"]}, "distinct"),
        ("model", {"learn": "length"}, "model.learn = 'length': expected a list"),
        ("fit", {"engine": "dense"}, '"global", "hip", "exact"'),
        ("fit", {"samples": 1}, "expected a whole number >= 2"),
        ("fit", {"samples": 10**23}, "a whole number >= 2 and <= 9223372036854775807"),
        ("model", {"scatter": 1e300}, "a number >= 0, of a size from 1e-30 to 1e+30"),
        ("model", {"std": 1e-300}, "of a size from 1e-30 to 1e+30"),
        ("model", {"length": 1e300}, "of a size from 1e-30 to 1e+30"),
        ("grid", {"spacing": 1e-20}, "along X = 1000 pc is 1e+23 times grid.spacing"),
        ("grid", {"spacing": "1e-320pc"}, "expected a positive length"),
        ("model", {"length": "1e300pc"}, '"0.3kpc", of a size from 1e-30 to 1e+30'),
        ("data", {"distance_max": 1e23}, "expected a positive length <= 1e+12 pc"),
        (
            "data",
            {"catalog": "stars\0.fits"},
            "expected a text that is not empty, in UTF-8 and without NUL",
        ),
        ("fit", {"family": "rank"}, '"auto", "mean-field", "low-rank", "block", "full"'),
        ("fit", {"rank": -1}, "fit.rank = -1: expected a whole number >= 0"),
        ("fit", {"whitening": "lanczos"}, '"auto", "hip", "torus", "cholesky", "ciq"'),
        ("fit", {"seed": 1.5}, "fit.seed = 1.5: expected a whole number >= 0"),
        ("fit", {"max_steps": 0}, "expected a whole number >= 1"),
        ("compute", {"memory": "8"}, 'such as "8GiB"'),
        ("compute", {"memory": 8}, 'such as "8GiB"'),
        ("compute", {"device": "tpu"}, '"auto", "cpu", "cuda"'),
        ("export", {"formats": ["png"]}, '"zarr", "fits"'),
    ],
)
def test_impossible_values_name_the_key_what_came_and_what_may(
    section: str, values: dict[str, object], words: str
) -> None:
    assert words in refusal(**{section: values})


@pytest.mark.parametrize(
    ("section", "key", "words"),
    [
        ("grid", "spaceing", "unknown key grid.spaceing; did you mean grid.spacing?"),
        ("model", "spacing", "unknown key model.spacing; did you mean grid.spacing?"),
        ("fit", "qqq", "unknown key fit.qqq; known are engine, "),
    ],
)
def test_unknown_keys_suggest_the_nearest(section: str, key: str, words: str) -> None:
    assert words in refusal(**{section: {key: object()}})


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["model.noise=student-t", "fit.engine=hip"], 'model.noise = "student-t" is for'),
        (["model.density=lognormal", "fit.engine=exact"], 'model.density = "lognormal" is for'),
        (["model.density=gaussian", "model.mean=bubble"], "is for model.density"),
        (["model.mean_density=-1"], "expected a positive median"),
        (["fit.engine=hip", "fit.block=[2,2]"], "fit.block = [2, 2]: expected three numbers"),
        (["model.density=gaussian", "model.mean_density=0"], "model.std = 0 stands for"),
    ],
)
def test_models_that_no_engine_has_are_refused(settings: list[str], words: str) -> None:
    with pytest.raises(UserError, match=re.escape(words)):
        read(*settings)


def test_the_density_is_positive_where_an_engine_has_it() -> None:
    assert read().density == "lognormal"
    assert read("fit.engine=hip").density == "gaussian"
    assert read("model.noise=student-t").density == "lognormal"
    assert read("model.density=gaussian").density == "gaussian"


def test_noise_forgives_outliers_where_an_engine_has_it() -> None:
    assert read().model.noise == "student-t"
    assert read("model.noise=auto").model.noise == "student-t"
    assert read("model.noise=auto", "fit.engine=hip").model.noise == "gaussian"


def test_dust_lies_in_a_disc_with_a_cavity_where_they_are_learned() -> None:
    assert read().model.mean == "auto"  # by the stars
    for whole in ("data.tile=1/3", "data.groups=survey"):
        assert read(whole).model.mean == "bubble", whole
    small = "grid.size=[160,160,120]"
    assert read(small).model.mean == "auto"  # with nodes around it, if stars ask for them
    assert read(small, "grid.around=none").model.mean == "disc"
    assert read(small, "model.cavity_radius=30").model.mean == "auto"
    assert read(small, "grid.center=[300,0,0]").model.mean == "auto"
    assert read("model.mean=constant").model.mean == "constant"
    assert read("model.learn=[]", "model.disc_height=120").model.mean == "disc"
    for held in ('model.learn=["length"]', "model.density=gaussian", "fit.engine=hip"):
        assert read(held).model.mean == "constant", held


def test_what_is_learned_is_what_the_density_has() -> None:
    usual = ("length", "std", "mean", "noise")
    assert read().model.learn == (*usual, "relative_scatter")
    for other in ("model.density=gaussian", "fit.engine=hip", "data.combine=1"):
        assert read(other).model.learn == usual, other
    assert read('model.learn=["auto", "scatter"]').model.learn[-1] == "scatter"
    assert read("model.learn=[]").model.learn == ()


def test_unknown_sections_suggest_the_nearest() -> None:
    assert "unknown section [grd]; did you mean grid?" in refusal(grd={})
    with pytest.raises(UserError, match=r"expected a section \[grid\]"):
        config.from_mapping({"grid": 3})


def test_set_wins_over_the_file_and_needs_no_quotes() -> None:
    resolved = read(
        "grid.spacing=10pc",
        "model.learn=[]",
        "fit.engine=hip",
        "data.holdout = 0.25",
        grid={"spacing": 20},
    )
    assert resolved.grid.spacing == 10.0
    assert resolved.model.learn == ()
    assert resolved.fit.engine == "hip"
    assert resolved.data.holdout == 0.25


@pytest.mark.parametrize("override", ["grid.spacing", "spacing=3", ".a=3", "grid.=3"])
def test_set_refuses_what_is_no_assignment(override: str) -> None:
    assert refusal(override) == f"--set {override}: expected section.key=value"


def test_the_nearest_sizes_are_named_together() -> None:
    for size, nearest in (([5, 30, 30], "15, 30, 30"), ([31, 44, 100], "30, 45, 105")):
        refused = refusal(grid={"size": size, "spacing": 15})
        assert f"expected multiples of grid.spacing = 15 pc, such as [{nearest}]" in refused
        named = tuple(map(float, nearest.split(", ")))
        assert read(grid={"size": list(named), "spacing": 15}).grid.size == named


def test_names_of_columns_add_to_those_of_the_file() -> None:
    named: dict[str, object] = {"catalog": "s.fits", "columns": {"l": "GLON", "b": "GLAT"}}
    found = read("data.columns.l=LON", "data.columns.distance=D [kpc]", data=named)
    assert dict(found.data.columns) == {"l": "LON", "b": "GLAT", "distance": "D [kpc]"}
    assert config.sha256(found) != config.sha256(read())
    assert "data.columns = {'l': 3}: expected a text" in refusal("data.columns.l=3")
    assert "data.columns = 3: expected a table such as" in refusal("data.columns=3")
    regression: dict[str, object] = {"catalog": "s.fits", "kind": "regression", "inputs": ["x"]}
    assert '[data.columns] is for data.kind = "stars"' in refusal(
        "data.columns.l=GLON", "data.target=y", data=regression
    )


def test_set_refuses_unknown_keys() -> None:
    assert "did you mean fit.seed" in refusal("fit.sed=3")


def test_paths_start_at_the_file_they_stand_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    path = tmp_path / "run.toml"
    path.write_text('[data]\ncatalog = ["a.fits", "/b.fits"]\ntruth = "../t.zarr"\n')
    assert config.load(path).data.catalog == (str(tmp_path / "a.fits"), "/b.fits")
    assert config.load(path).data.truth == str(tmp_path.parent / "t.zarr")
    assert config.load(path, ["data.catalog=c.fits"]).data.catalog == (
        str(tmp_path / "here" / "c.fits"),
    )


def test_a_schema_is_a_name_or_the_path_of_a_card(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('data = {catalog = "a.fits", schema = "zgr23"}\n')
    assert config.load(path).data.schema == "zgr23"
    path.write_text('data = {catalog = "a.fits", schema = "cards/mine.toml"}\n')
    assert config.load(path).data.schema == str(tmp_path / "cards" / "mine.toml")


def test_files_that_do_not_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.toml: cannot be read"):
        config.load(tmp_path / "none.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("[data\n")
    with pytest.raises(UserError, match=r"broken\.toml: not a TOML file [^;]*$"):
        config.load(broken)


@pytest.mark.parametrize("content", [b"\xe8\x00", b"l,b\n1,2\n", b"#" * 300_000])
def test_data_in_place_of_a_configuration(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "stars.fits").write_bytes(content)
    with pytest.raises(UserError, match="named in a configuration: see dustmap config --example"):
        config.load(tmp_path / "stars.fits")


def test_only_files_that_end_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/zero")):
        with pytest.raises(UserError, match="expected a file, got"):
            config.load(path)
    long = tmp_path / "long.toml"
    long.write_text("#" * 300_000)
    with pytest.raises(UserError, match="at most 262,144 bytes"):
        config.load(long)


@pytest.mark.parametrize(
    "content", ["a" + ".a" * 50_000 + " = 1", "[a" + ' . "a.b"' * 20_000 + "]", "a" + ".'a'" * 60]
)
def test_keys_without_bottom(tmp_path: Path, content: str) -> None:
    (tmp_path / "deep.toml").write_text(content)
    with pytest.raises(UserError, match=r"deep\.toml: not a TOML file \(keys of more than 50"):
        config.load(tmp_path / "deep.toml")
    (tmp_path / "fine.toml").write_text(f'[data]\ncatalog = "{"a." * 49}fits"\n')
    assert config.load(tmp_path / "fine.toml").data.catalog[0].endswith(".fits")
    assert "grid.size" in refusal("grid.size={a" + ".a" * 60_000 + "=1}")


def test_a_catalog_is_required() -> None:
    with pytest.raises(UserError, match=r"data\.catalog is missing"):
        config.from_mapping({})


def test_regression_names_its_columns() -> None:
    data: dict[str, object] = {"catalog": "d.csv", "kind": "regression"}
    resolved = read(data={**data, "inputs": ["x", "y"], "target": "z", "error": "e"})
    assert (resolved.data.inputs, resolved.data.target) == (("x", "y"), "z")
    assert "data.inputs = []: expected the names of 1 to 3 columns" in refusal(data=data)
    for target in ("x", "log(x)", "log10(x)"):
        known = data | {"inputs": ["x"], "target": target}
        assert "column x stands twice in data.inputs, data.target" in refusal(data=known)
    assert "data.target is missing" in refusal(data={**data, "inputs": "x"})


@pytest.mark.parametrize(
    ("written", "count"), [("1.5MiB", 3 * 2**19), ("10MB", 10**7), ("2 GB", 2 * 10**9)]
)
def test_memory_is_a_number_of_bytes(written: str, count: int) -> None:
    assert read(f"compute.memory={written}").compute.memory_bytes == count


def test_sizes_name_their_units() -> None:
    assert "in B, KiB, MiB, GiB, TiB, kB, MB, GB, TB" in refusal("compute.memory=10mb")


@pytest.mark.parametrize(
    "setting",
    ["model.std=1e6", "model.mean_density=1e30", "model.mean_density=-1e4"],
)
def test_no_dust_is_as_dense_or_as_uneven(setting: str) -> None:
    name = setting.partition("=")[0]
    assert f"{name} = " in refusal("model.std=1", "model.density=gaussian", setting)
    # The units of a regression are the user's.
    data: dict[str, object] = {"kind": "regression", "inputs": "x", "target": "y"}
    read("model.std=1", setting, data={"catalog": "stars.csv", **data})


def test_the_spread_of_a_logarithm_is_no_density() -> None:
    assert "of the logarithm" in refusal("model.std=11")
    read("model.std=11", "model.density=gaussian")


def test_smoothness_belongs_to_the_kernel_matern() -> None:
    catalog = "data.catalog=sky.fits"
    named = config.from_mapping({}, [catalog, "model.kernel=matern", "model.nu=0.8"])
    assert named.model.kernel_name == "matern-0.8"
    assert config.from_mapping({}, [catalog]).model.kernel_name == "auto"
    regression = ["data.kind=regression", "data.inputs=[x]", "data.target=y"]
    for learned, kernel in (("[length, std, mean, noise]", "auto"), ("[mean, noise]", "matern32")):
        open_to_data = config.from_mapping(
            {}, [catalog, *regression, f"model.learn={learned}", "model.std=1"]
        )
        assert open_to_data.model.kernel_name == kernel
    two = config.from_mapping({}, [catalog, "model.kernel=matern32+matern12"])
    assert two.model.kernel_name == "matern32+matern12"
    for wrong in ("matern32+auto", "matern+matern12", "matern32+", "matern32+matern12+matern13"):
        with pytest.raises(UserError, match=r'or the sum of two, "matern13\+matern12"'):
            config.from_mapping({}, [catalog, f"model.kernel={wrong}"])
    with pytest.raises(UserError, match=r"inducing points .* are spaced for one length"):
        config.from_mapping({}, [catalog, "model.kernel=matern32+matern12", "fit.engine=hip"])
    with pytest.raises(UserError, match=r'model.nu = 0.8 is for model.kernel = "matern"'):
        config.from_mapping({}, [catalog, "model.nu=0.8"])
    for nu in ("0", "-1", "10.5", "nan"):
        with pytest.raises(UserError, match=r"model.nu = .*expected a number > 0 and <= 10"):
            config.from_mapping({}, [catalog, "model.kernel=matern", f"model.nu={nu}"])


@pytest.mark.parametrize(
    ("settings", "keys"),
    [
        ((), ()),
        (("fit.batch=10", "fit.epochs=3", "fit.block=[4,4,4]"), ("epochs", "batch", "block")),
        (("fit.whitening=ciq", "fit.learn_rows=9"), ("whitening", "learn_rows")),
        (("fit.engine=hip", "fit.whitening=ciq", "fit.learn_rows=9"), ()),
        (
            ("fit.engine=hip", "fit.family=full", "fit.rank=7", "fit.block=[4,4,4]"),
            ("rank", "block"),
        ),
        (("fit.engine=hip", "fit.batch=10"), ("batch",)),
        (("fit.engine=hip", "fit.batch=10", "fit.epochs=2"), ()),
        (("fit.engine=hip", "fit.beams=64"), ("beams",)),
        (("fit.engine=hip", "fit.samples=9", "fit.tolerance=1e-2"), ("samples",)),
        (("fit.tolerance=1e-2", "model.line_integral=quadrature"), ("tolerance", "line_integral")),
        (("fit.beams=64",), ()),
        (("model.mean=constant", "model.disc_height=50pc"), ("disc_height",)),
        (("model.mean=disc", "model.cavity_radius=20pc"), ("cavity_radius",)),
        (("model.mean=bubble", "model.cavity_radius=20pc", "model.disc_length=2kpc"), ()),
        (("data.tile_margin=50pc",), ("tile_margin",)),
        (("data.magnitude_column=g",), ("magnitude_column",)),
        (("data.magnitude_column=g", "data.magnitude_limit=15"), ()),
        (("data.far_column_factor=2",), ("far_column_factor",)),
        (("model.group_std=0.1",), ("group_std",)),
        (('data.inputs=["l"]',), ("inputs",)),
    ],
)
def test_keys_without_effect_are_named(settings: tuple[str, ...], keys: tuple[str, ...]) -> None:
    idle = config.idle_keys(read(*settings))
    assert {words.split()[0].split(".")[1] for words in idle} == set(keys)
    assert all(words.endswith("it has no effect") for words in idle)


def test_keys_of_stars_have_no_effect_on_regressions() -> None:
    table = {
        "kind": "regression",
        "inputs": ["x"],
        "target": "y",
        "cuts": "none",
        "catalog": "t.csv",
    }
    made = config.from_mapping({"data": table}, ["fit.whitening=ciq", "fit.learn_rows=9"])
    assert config.idle_keys(made) == ('data.cuts is for data.kind = "stars": it has no effect',)


PIPELINES = Path(__file__).parents[1] / "pipelines"


@pytest.mark.parametrize("path", sorted(PIPELINES.glob("*.toml")), ids=lambda path: path.name)
def test_no_key_of_the_pipelines_is_without_effect(path: Path) -> None:
    assert config.idle_keys(config.load(path)) == ()


def test_paths_that_lead_nowhere_are_refused(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for given in ("~nobody-of-this-name/stars.fits", str(tmp_path / "loop")):
        path = tmp_path / "run.toml"
        path.write_text(f'[data]\ncatalog = "{given}"\n')
        with pytest.raises(UserError, match="expected a path, got one that leads nowhere"):
            config.load(path)
    assert "in UTF-8" in refusal(data={"catalog": "stars\udcff.fits"})


def test_times_have_an_end() -> None:
    assert "of a year at most" in refusal("compute.timeout=1e300 h")


def test_a_regression_has_no_scatter_of_stars() -> None:
    regression = {"kind": "regression", "inputs": ["x"], "target": "y"}
    words = refusal("model.learn=[length, std, mean, scatter]", data={**TABLE, **regression})
    assert "which is of stars" in words
    given = ("model.scatter=0.5", "data.parallax_zero_point=0.1")
    idle = config.idle_keys(config.from_mapping({"data": {**TABLE, **regression}}, given))
    assert {words.split()[0] for words in idle} == {"model.scatter", "data.parallax_zero_point"}
