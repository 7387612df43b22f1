use super::options::MonitorOptions;
use crate::configuration::tests::{expect, folder, load};

#[test]
fn the_monitor_is_read_and_checked() {
    let folder = folder();
    let text = "[monitor]\naddress = \"centre:10810\"\ncertificate = \"disk.img\"\n\
                key = \"disk.img\"\nauthority = \"other.img\"\ncentre_name = \"c\"\nbuffer = \"1M\"\n\
                held_max = 7\n";
    let monitor =
        load(folder.path(), text).unwrap().one::<MonitorOptions>().unwrap().definition.clone();
    assert_eq!((monitor.address.as_str(), monitor.buffer.0), ("centre:10810", 1 << 20));
    assert_eq!(monitor.held_max.get(), 7);
    assert_eq!(monitor.files().unwrap().authority, Some(folder.path().join("other.img")));
    let text = "[monitor]\naddress = \"centre:10810\"\nplain_allowed = true\n";
    let monitor =
        load(folder.path(), text).unwrap().one::<MonitorOptions>().unwrap().definition.clone();
    assert_eq!((monitor.files(), monitor.buffer.0), (None, 8 << 20));
    assert_eq!(monitor.held_max.get(), 10_000_000);
    assert_eq!(load(folder.path(), "").unwrap().one::<MonitorOptions>(), None);

    expect(
        "[monitor]\naddress = \"centre:10810\"\n",
        "f.toml:1:1: [monitor] would send events in plain text\n  → add `certificate`, `key` and \
         `authority`, or `plain_allowed = true` if the network is trusted",
    );
    expect(
        "[monitor]\nplain_allowed = true\naddress = \"unix:/x\"\nname = \"a b\"\nbuffer = 1\n",
        "f.toml:3:11: \"unix:/x\" is not an address of a centre\n  → write it like `address = \
         \"monitor.example:10810\"`\nf.toml:4:8: \"a b\" is not a valid name of a host\n  → choose one of \
         at most 253 bytes, without spaces\nf.toml:5:10: the buffer of [monitor] cannot have this \
         size\n  → choose a size from 64K to 1G",
    );
    expect(
        "[monitor]\naddress = \"c:1\"\nkey = \"none\"\ncert = 1\n",
        "f.toml:3:7: none: no such file or folder\n  → name a file that the daemon may read\n\
         f.toml:4:1: there is no key `cert` in [monitor]\n  → known here: `address`, \
         `centre_name`, `name`, `certificate`, `key`, `authority`, `plain_allowed`, `buffer`, \
         `held_max`",
    );
    expect(
        "[monitor]\naddress = \"c:1\"\nkey = \"none\"\n",
        "f.toml:1:1: [monitor] has no `certificate` and no `authority`\n  → name all of \
         `certificate`, `key` and `authority`, or none\nf.toml:3:7: none: no such file or \
         folder\n  → name a file that the daemon may read",
    );
}
