use std::fs;

use fathom_control::{Bytes, LayerDefinition, Nanoseconds};
use serde_json::json;

use super::*;

/// A folder with `disk.img` (1 MiB), `other.img` and `empty.img`.
pub(crate) fn folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (name, size) in [("disk.img", 1 << 20), ("other.img", 1 << 20), ("empty.img", 0)] {
        fs::File::create(folder.path().join(name)).unwrap().set_len(size).unwrap();
    }
    folder
}

pub(crate) fn load(folder: &Path, text: &str) -> Result<Configuration, Problems> {
    let path = folder.join("f.toml");
    fs::write(&path, text).unwrap();
    let control = Some(folder.join("control.sock"));
    let control = control.filter(|_| !text.contains("control ="));
    ConfigurationFile { path, control, ..ConfigurationFile::default() }.load_strictly()
}

/// The problems of `text`, without the folder's name.
fn problems(text: &str) -> String {
    let folder = folder();
    let problems = load(folder.path(), text).expect_err("this configuration is wrong");
    problems.to_string().replace(&format!("{}/", folder.path().display()), "")
}

#[track_caller]
pub(crate) fn expect(text: &str, expected: &str) {
    assert_eq!(problems(text), expected);
}

#[test]
fn a_full_configuration_is_read() {
    let folder = folder();
    let configuration = load(
        folder.path(),
        r#"
[daemon]
control = "run.sock"
metrics = "9560"
metrics_cgroups_max = 7
log = "warning"
shutdown_time_max = "2.5s"

[[disk]]
name = "root"
vm = "web"
serial = "R1"
image = "disk.img"
direct = true
block_size = "4K"
class_bounds = ["1G", 4096]
layers = [
    { kind = "delay", time = "5ms", jitter = "1ms", operations = ["read"], seed = 7 },
    { kind = "fault", effect = "torn", rate = 0.01, offset = "1M", length = 4096, after = 10 },
    { kind = "log", lines_per_second_max = 0, file = "lines" },
]
model = { kind = "ssd", seed = 1 }
[disk.vhost_user]
socket = "root.sock"
queues = 2
spin = "0"

[[disk]]
name = "scratch"
memory = "1.5G"
tap = false
classify = false
read_only = true

[[nbd]]
address = "unix:nbd.sock"
exports = ["scratch"]

[[nbd]]
address = "127.0.0.1:10809"
plain_allowed = true
"#,
    )
    .unwrap();
    let daemon = &configuration.daemon.definition;
    assert_eq!(daemon.control, folder.path().join("run.sock"));
    assert_eq!(daemon.metrics, Some(SocketAddr::from(([127, 0, 0, 1], 9560))));
    assert_eq!((daemon.log, daemon.metrics_cgroups_max), (LogLevel::Warning, 7));
    assert_eq!(daemon.shutdown_time_max, Nanoseconds(2_500_000_000));
    let root = &configuration.disks[0].definition;
    assert_eq!(root.image, Some(folder.path().join("disk.img")));
    assert_eq!(root.block_size.unwrap().0, 4096);
    assert_eq!(
        root.layers.iter().map(fathom_control::LayerDefinition::name).collect::<Vec<_>>(),
        ["delay", "fault", "log"]
    );
    assert_eq!(root.vhost_user.as_ref().unwrap().spin.unwrap().0, 0);
    assert!(root.tap && root.classify && root.direct && !root.read_only);
    assert_eq!(root.class_bounds, Some(vec![Bytes(1 << 30), Bytes(4096)]));
    let file = folder.path().join("lines");
    let log = LayerDefinition::new("log", json!({ "lines_per_second_max": 0, "file": file }));
    assert_eq!(root.layers[2], log);
    let scratch = &configuration.disks[1].definition;
    assert_eq!(scratch.memory.unwrap().0, 3 << 29);
    assert!(!scratch.tap && !scratch.classify && scratch.read_only);
    let address = format!("unix:{}/nbd.sock", folder.path().display());
    assert_eq!(configuration.listeners[0].definition.address, address);
    assert!(configuration.listeners[1].definition.plain_allowed);
}

#[test]
fn an_unknown_key_gets_the_nearest_known_one() {
    expect(
        "[[disk]]\nname = \"a\"\nimgae = \"disk.img\"\n\n[deamon]\n",
        "\
f.toml:3:1: there is no key `imgae` in [[disk]]
  → did you mean `image`?
f.toml:5:2: there is no key `deamon` in the configuration
  → did you mean `daemon`?",
    );
    expect(
        "[[disk]]\nname = \"a\"\nmemory = \"1M\"\nvhost_user = { scoket = \"a.sock\" }\n",
        "\
f.toml:4:14: [disk.vhost_user] has no socket
  → add a line like `socket = \"/run/fathom/disk.sock\"`
f.toml:4:16: there is no key `scoket` in [disk.vhost_user]
  → did you mean `socket`?",
    );
    expect(
        "[daemon]\nzzz = 1\n",
        "\
f.toml:2:1: there is no key `zzz` in [daemon]
  → known here: `control`, `control_group`, `view_group`, `metrics`, `metrics_cgroups_max`, `log`, `nbd_memory`, `nbd_client_memory`, `cache_index_percent`, `store_index_memory`, `shutdown_time_max`, `idle_requests`, `idle_time`, `keepsakes`",
    );
}

#[test]
fn a_wrong_type_gets_an_example() {
    expect(
        "[[disk]]\nname = 5\nmemory = true\ndirect = \"yes\"\nlayers = \"tap\"\n",
        "\
f.toml:2:8: `name` of [[disk]] has to be a text, and is a whole number
  → write it like `name = \"…\"`
f.toml:3:10: `memory` of [[disk]] has to be a size, and is true or false
  → write it like `memory = \"10G\"`
f.toml:4:10: `direct` of [[disk]] has to be true or false, and is a text
  → write it like `direct = true`
f.toml:5:10: `layers` of [[disk]] has to be a list, and is a text
  → write it like `layers = […]`",
    );
    expect(
        "disk = { name = \"a\" }\n",
        "\
f.toml:1:8: `disk` has to be a list of tables
  → begin each one with [[disk]]",
    );
    expect(
        "[[disk]]\nname = \"ä\"\nmemory = \"10GB\"\nlayers = [{ kind = \"delay\", time = 5.0 }]\n",
        "\
f.toml:3:10: `memory` of [[disk]]: \"10GB\" is not a size
  → write it like 512, 64K, 1.5G or 2TiB
f.toml:4:36: `time` of the layer `delay` has to be a time, and is a number
  → write it like `time = \"5ms\"`",
    );
}

#[test]
fn all_mistakes_of_the_daemon_and_of_the_monitor_have_their_places() {
    expect(
        "daemon = 7\nmonitor = []\n",
        "\
f.toml:1:10: `daemon` of the configuration has to be a table, and is a whole number
  → write it like `daemon = { … }`
f.toml:2:11: `monitor` of the configuration has to be a table, and is a list
  → write it like `monitor = { … }`",
    );
    expect(
        "[daemon]\ncontrol = \"\"\nmetrics = \"here\"\nmetrics_cgroups_max = 10001\nlog = \"warn\"\n\
         nbd_memory = \"1M\"\nnbd_client_memory = inf\nshutdown_time_max = -1\n\
         [monitor]\naddress = 5\nplain_allowed = \"yes\"\nheld_max = 0\nbuffer = \"1T\"\nname = \"\"\n",
        "\
f.toml:2:11: `control` of [daemon] is not a path
  → name a file, or leave the line out
f.toml:3:11: `metrics` of [daemon]: \"here\" is not an address for metrics
  → write it like `metrics = \"127.0.0.1:9560\"`, or only the port for this host
f.toml:4:23: `metrics_cgroups_max` of [daemon] is out of range
  → choose a number from 0 to 10000
f.toml:5:7: `log` of [daemon] cannot be \"warn\"
  → did you mean `warning`?
f.toml:6:14: 1 MiB are not enough for the longest NBD request
  → choose 64 MiB or more
f.toml:7:21: `nbd_client_memory` of [daemon] has to be a finite number
  → correct it, or leave the line out
f.toml:8:21: `shutdown_time_max` of [daemon] is out of range
  → write it like `shutdown_time_max = \"5ms\"`
f.toml:10:11: `address` of [monitor] has to be a text, and is a whole number
  → write it like `address = \"…\"`
f.toml:11:17: `plain_allowed` of [monitor] has to be true or false, and is a text
  → write it like `plain_allowed = true`
f.toml:12:12: `held_max` of [monitor] is out of range
  → choose a number from 1 up
f.toml:13:10: the buffer of [monitor] cannot have this size
  → choose a size from 64K to 1G
f.toml:14:8: \"\" is not a valid name of a host
  → choose one of at most 253 bytes, without spaces",
    );
}

#[test]
fn invalid_toml_has_its_place() {
    expect(
        "[daemon]\nlog = \n",
        "\
f.toml:2:7: string values must be quoted, expected literal string
  → a configuration has the syntax of TOML: see https://toml.io",
    );
}

#[test]
fn a_missing_image_names_the_command_that_makes_one() {
    expect(
        "[[disk]]\nname = \"a\"\nimage = \"missing.img\"\n",
        "\
f.toml:3:9: there is no image missing.img
  → make one with `fathom disk create missing.img 10G`, or correct the path",
    );
    expect(
        "[[disk]]\nname = \"a\"\nimage = \"empty.img\"\n[[disk]]\nname = \"b\"\nimage = \".\"\n",
        "\
f.toml:3:9: the image empty.img is empty
  → give it a size with `fathom disk resize empty.img 10G`
f.toml:6:9: . is neither a file nor a block device
  → name a raw image",
    );
}

/// What the host lacks concerns the disks and listeners that need it, not the configuration.
#[test]
fn a_configuration_is_read_without_what_it_names() {
    let folder = folder();
    let path = folder.path().join("f.toml");
    let text = "[daemon]\ncontrol = \"c.sock\"\n\
                [[disk]]\nname = \"a\"\nimage = \"missing.img\"\n\
                vhost_user = { socket = \"none/a.sock\", group = \"no-such-group\" }\n\
                [[disk]]\nname = \"b\"\nimage = \"empty.img\"\n\
                [[nbd]]\naddress = \"127.0.0.1:1\"\n\
                tls = { certificate = \"none.pem\", key = \"none.pem\" }\n";
    fs::write(&path, text).unwrap();
    let file = ConfigurationFile { path: path.clone(), ..ConfigurationFile::default() };
    assert_eq!(file.load().unwrap().disks.len(), 2);
    let problems = file.load_strictly().unwrap_err().to_string();
    for line in ["f.toml:5:9", "f.toml:6:25", "f.toml:9:9", "f.toml:12:23"] {
        assert!(problems.contains(line), "{line}: {problems}");
    }
    // Two disks with the image at one path contradict each other.
    fs::write(&path, text.replace("empty.img", "./missing.img")).unwrap();
    let problems = file.load().unwrap_err().to_string();
    assert!(problems.contains("is also that of the disk \"a\""), "{problems}");
}

#[test]
fn a_disk_has_a_name_and_one_store() {
    expect(
        "[[disk]]\nimage = \"disk.img\"\nmemory = \"1M\"\n\n[[disk]]\nname = \"a/b\"\n",
        "\
f.toml:1:1: a disk has no name
  → add `name = \"…\"`
f.toml:3:10: a disk has `image` and `memory`
  → keep one of them: a disk has only one store
f.toml:5:1: the disk \"a/b\" has no store
  → add `image = \"disk.img\"`, or `memory = \"1G\"` for a disk in memory
f.toml:6:8: a disk cannot be called \"a/b\"
  → choose a name of at most 128 bytes, without slashes",
    );
    expect(
        "[[disk]]\nname = \"a\"\nmemory = 1000\nblock_size = 512\ndirect = true\nserial = \"123456789012345678901\"\n",
        "\
f.toml:3:10: the disk \"a\" cannot have a size of 1000 bytes
  → choose a multiple of 512, for example `memory = \"1G\"`
f.toml:4:14: `block_size` is for raw images only
  → leave it out: this disk has the smallest blocks that its store allows
f.toml:5:10: `direct` is for images and stores only
  → leave it out: this disk does not use the page cache
f.toml:6:10: the serial \"123456789012345678901\" is longer than 20 bytes
  → shorten it: a virtio disk has no space for more",
    );
}

#[test]
fn a_server_and_a_format_have_keys_of_their_own() {
    expect(
        r#"[[disk]]
name = "a"
nbd = "nbd://localhost/x"
timeout = "1ms"
format = "qcow2"
[[disk]]
name = "b"
nbd = "nbd://localhost:10809/x"
[[disk]]
name = "c"
nbd = "nbd://10.0.0.1/x"
[[disk]]
name = "d"
image = "disk.img"
timeout = "1s"
backing_folders = ["/srv"]
"#,
        "\
f.toml:4:11: requests to a server cannot have this time limit
  → choose one from 1s to 1h
f.toml:5:10: `format` is for images only
  → leave it out: this disk has no image
f.toml:8:7: the export localhost:10809/x is also that of the disk \"a\", and a writer cannot share it
  → give each disk a different export, or make both `read_only = true` (the other is in line 3)
f.toml:11:7: \"nbd://10.0.0.1/x\" would cross the network in plain text
  → use `nbds://` with `tls-certificates`
f.toml:15:11: `timeout` is for disks on NBD servers and for images that are not raw
  → leave it out: the host's kernel decides how long requests of this disk are tried
f.toml:16:19: `backing_folders` is for images with a `format` other than raw
  → leave it out: a raw image has no backing files",
    );
    assert!(
        problems("[[disk]]\nname = \"a\"\nimage = \"disk.img\"\nformat = \"qed\"\n")
            .contains("qcow2")
    );
}

#[test]
fn two_disks_share_no_name_socket_or_written_image() {
    expect(
        r#"[[disk]]
name = "a"
image = "disk.img"
vhost_user = { socket = "a.sock" }
[[disk]]
name = "a"
image = "./disk.img"
vhost_user = { socket = "./a.sock" }
[[disk]]
name = "c"
memory = "1M"
vhost_user = { socket = "control.sock" }
"#,
        "\
f.toml:6:8: there are two disks called \"a\"
  → give each a different name (the other is in line 2)
f.toml:7:9: the image ./disk.img is also that of the disk \"a\", and a writer cannot share it
  → give each disk a different image, or make both `read_only = true` (the other is in line 3)
f.toml:8:25: the socket ./a.sock is used twice
  → give each a different socket (the other is in line 4)
f.toml:12:25: the socket control.sock is used twice
  → give each a different socket",
    );
}

#[test]
fn two_readers_may_share_an_image_and_a_link_is_the_same_image() {
    let folder = folder();
    let text = |read_only: bool| {
        format!(
            "[[disk]]\nname = \"a\"\nimage = \"disk.img\"\nread_only = true\n\
             [[disk]]\nname = \"b\"\nimage = \"link.img\"\nread_only = {read_only}\n"
        )
    };
    std::os::unix::fs::symlink("disk.img", folder.path().join("link.img")).unwrap();
    load(folder.path(), &text(true)).unwrap();
    let problems = load(folder.path(), &text(false)).unwrap_err();
    assert!(problems.to_string().contains("f.toml:7:9: the image "), "{problems}");
}

#[test]
fn sockets_need_a_folder_and_a_short_path() {
    expect(
        "[[disk]]\nname = \"a\"\nmemory = \"1M\"\nvhost_user = { socket = \"none/a.sock\" }\n\
         [[disk]]\nname = \"b\"\nmemory = \"1M\"\nvhost_user = { socket = \"disk.img\" }\n",
        "\
f.toml:4:25: the socket none/a.sock cannot be made: none: no such file or folder
  → make the folder with `mkdir -p none`, or choose another
f.toml:8:25: disk.img exists and is not a socket
  → choose another path, or remove it if it is not needed",
    );
    let long = format!("/tmp/{}", "x".repeat(120));
    let text = problems(&format!("[daemon]\ncontrol = \"{long}\"\n"));
    assert!(text.starts_with("f.toml:2:11: the socket's path is longer than 107 bytes"), "{text}");
}

#[test]
fn layers_and_queues_are_checked() {
    expect(
        r#"[[disk]]
name = "a"
memory = "1M"
layers = [
  { time = "1ms" },
  { kind = "dealy" },
  { kind = "delay", operations = ["reed"] },
]
[disk.vhost_user]
socket = "a.sock"
queues = 300
"#,
        "\
f.toml:5:3: a layer has no `kind`
  → add `kind = \"delay\"`
f.toml:6:12: there is no kind of layer \"dealy\"
  → did you mean `delay`?
f.toml:7:34: `operations` of the layer `delay` cannot be \"reed\"
  → did you mean `read`?
f.toml:11:10: a disk cannot have 300 queues
  → choose a number from 1 to 256: one for each of the guest's CPUs",
    );
    expect(
        "[[disk]]\nname = \"a\"\nmemory = \"1M\"\n\
         layers = [{ kind = \"tap\" }, { kind = \"tap\" }, { kind = \"fault\", rate = 2 }]\n",
        "\
f.toml:4:10: the disk \"a\" has 2 layers `tap`
  → keep one: it would count everything twice
f.toml:4:72: a rate of 2 is not between 0 and 1
  → choose a number from 0 to 1: 0.01 strikes one request in a hundred",
    );
}

#[test]
fn classes_and_log_files_are_checked() {
    expect(
        "[[disk]]\nname = \"a\"\nmemory = \"1M\"\nclass_bounds = [\"1M\", \"2M\"]\n\
         layers = [{ kind = \"classify\" }, { kind = \"classify\" }]\n",
        "\
f.toml:4:16: these are not valid bounds of classes: each bound of a file size must be smaller than the \
         one before it
  → write them like `class_bounds = [\"14M\", \"10M\", \"5M\", \"2M\", \"1M\"]`
f.toml:5:10: the disk \"a\" has 2 layers `classify`
  → keep one: it would account for everything twice",
    );
    expect(
        "[[disk]]\nname = \"a\"\nmemory = \"1M\"\nclass_bounds = \"1M\"\n",
        "\
f.toml:4:16: `class_bounds` of [[disk]] has to be a list, and is a text
  → write it like `class_bounds = […]`",
    );
    let text = problems(
        "[[disk]]\nname = \"a\"\nmemory = \"1M\"\n\
         layers = [{ kind = \"log\", file = \"nowhere/lines\" }]\n",
    );
    assert_eq!(
        text,
        "f.toml:4:34: lines cannot be appended to nowhere/lines\n  \
         → name a file in a folder that exists"
    );
}

#[test]
fn plain_nbd_over_tcp_must_be_allowed_explicitly() {
    expect(
        "[[nbd]]\naddress = \"0.0.0.0:10809\"\n[[nbd]]\naddress = \"here\"\nexports = [\"a\"]\n\
         [[nbd]]\naddress = \"[::1]:10809\"\ntls = { certificate = \"c.pem\" }\n",
        "\
f.toml:2:11: the listener at 0.0.0.0:10809 would serve disks over TCP in plain text
  → add [nbd.tls], or `plain_allowed = true` if the network is trusted
f.toml:4:11: \"here\" is not an address of an NBD listener
  → write it like `address = \"unix:/run/fathom/nbd.sock\"` or `address = \"127.0.0.1:10809\"`
f.toml:5:11: there is no disk \"a\" to export
  → this configuration has none
f.toml:8:7: [nbd.tls] has no certificate and key
  → add `certificate = \"…\"` and `key = \"…\"`, or `psk = \"…\"`
f.toml:8:23: c.pem: no such file or folder
  → name a file that the daemon may read",
    );
}

#[test]
fn a_missing_file_is_reported() {
    let file = ConfigurationFile { path: "/none/f.toml".into(), ..ConfigurationFile::default() };
    let problems = file.load().unwrap_err().to_string();
    assert!(problems.starts_with("/none/f.toml: no such file\n  → name the"), "{problems}");
}

/// Pieces of configurations, which a test combines at random.
const PIECES: [&str; 28] = [
    "[daemon]\n",
    "[[disk]]\n",
    "[disk.vhost_user]\n",
    "[[nbd]]\n",
    "[nbd.tls]\n",
    "name = ",
    "image = ",
    "memory = ",
    "layers = ",
    "model = ",
    "queues = ",
    "address = ",
    "exports = ",
    "\"a\"\n",
    "\"10G\"\n",
    "5\n",
    "-1\n",
    "0xffffffffffffffff\n",
    "1e400\n",
    "nan\n",
    "true\n",
    "[",
    "]",
    "{ kind = \"delay\", ",
    "time = ",
    "}\n",
    "1979-05-27\n",
    "'ä\u{0}'\n",
];

proptest::proptest! {
    #![proptest_config(proptest::prelude::ProptestConfig {
        rng_seed: proptest::test_runner::RngSeed::Fixed(7),
        failure_persistence: None,
        ..proptest::prelude::ProptestConfig::with_cases(2000)
    })]

    #[test]
    fn any_text_gives_a_configuration_or_problems(
        choice in proptest::collection::vec(0..PIECES.len(), 0..24),
        cut in 0_usize..300,
    ) {
        let text: String = choice.into_iter().map(|index| PIECES[index]).collect();
        crate::fuzz_configuration(text.get(..cut).unwrap_or(&text).as_bytes());
    }
}

#[test]
fn mistakes_of_all_kinds_are_reported_together_without_consequences() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("f.toml");
    let text = "[daemon]\nnbd_memory = \"1M\"\n\
                [[disk]]\nname = 5\nmemory = \"1M\"\n\
                [[disk]]\nname = \"b\"\nmemory = true\n\
                [[disk]]\nname = \"c\"\n\
                [[nbd]]\naddress = \"nowhere\"\nexports = [\"zzz\"]\n";
    std::fs::write(&path, text).unwrap();
    let file = ConfigurationFile { path, ..ConfigurationFile::default() };
    let problems = file.load().unwrap_err().to_string();
    let lines: Vec<&str> = problems
        .lines()
        .filter_map(|line| line.split_once("f.toml:").map(|(_, rest)| rest))
        .collect();
    let starts = [
        "2:14: 1 MiB are not enough",
        "4:8: `name` of [[disk]] has to be a text",
        "8:10: `memory` of [[disk]]",
        "9:1: the disk \"c\" has no store",
        "12:11: \"nowhere\" is not an address",
        "13:11: there is no disk \"zzz\"",
    ];
    assert_eq!(lines.len(), starts.len(), "{problems}");
    for (line, start) in lines.iter().zip(starts) {
        assert!(line.starts_with(start), "{line:?} is not {start:?}");
    }
}
