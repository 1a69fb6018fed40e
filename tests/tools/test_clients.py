"""What of a machine's apt and pip goes into a bare root."""

from pathlib import Path

from tools.fresh import clients


def test_pip_reads_the_users_file_after_the_systems(tmp_path: Path):
    system, user = tmp_path / "system.conf", tmp_path / "user.conf"
    system.write_text("[global]\nindex-url = https://one/simple\ntimeout = 5\n")
    user.write_text("[global]\nindex-url = https://two/simple\n[install]\nno-deps = 50%\n")
    settings = clients.pip_settings([system, user, tmp_path / "none.conf"])
    assert settings == {"global": {"index-url": "https://two/simple", "timeout": "5"}, "install": {"no-deps": "50%"}}


def test_variables_that_name_files_of_the_machine_stay_behind():
    env = {
        "PIP_INDEX_URL": "https://one/simple",
        "PIP_CERT": "/ca.pem",
        "PIP_CACHE_DIR": "/cache",
        "HTTPS_PROXY": "http://proxy:3128",
        "HOME": "/root",
    }
    wanted = {"PIP_INDEX_URL": "https://one/simple", "HTTPS_PROXY": "http://proxy:3128"}
    assert clients.pip_environment(env) == wanted


def test_folders_are_found_in_paths_and_urls(tmp_path: Path):
    wheels, index = tmp_path / "my wheels", tmp_path / "pypi/simple"
    plain = tmp_path / "wheels"
    for folder in (wheels, index, plain):
        folder.mkdir(parents=True)
    url = f"file://{str(wheels).replace(' ', '%20')}/simple"
    values = [f"https://pypi.org/simple file://{index}", str(plain), url, "/nowhere/here", "5"]
    assert clients.local_folders(values) == sorted([wheels, index.parent, plain])


def test_certificates_come_from_the_first_place_that_names_a_file(tmp_path: Path):
    bundle = tmp_path / "ca.pem"
    bundle.touch()
    assert clients.ca_bundle({"SSL_CERT_FILE": str(bundle)}, {}) == bundle
    assert clients.ca_bundle({"PIP_CERT": "/none.pem"}, {"global": {"cert": str(bundle)}}) == bundle


def test_only_archives_of_debian_itself_are_taken(tmp_path: Path):
    lists = tmp_path / "sources.list.d"
    lists.mkdir()
    (lists / "debian.sources").write_text("Types: deb\nSuites: bookworm bookworm-updates\nComponents: main\n")
    (lists / "cloud.list").write_text("deb https://packages.example cloud-sdk-bookworm main\n")
    (lists / "node.sources").write_text("Types: deb\nSuites: nodistro\n")
    (tmp_path / "sources.list").write_text("deb http://deb.example/debian-security bookworm-security main\n")
    assert clients.apt_sources("bookworm", tmp_path) == [tmp_path / "sources.list", lists / "debian.sources"]
