use std::fmt::Write as _;

use super::*;

#[test]
fn every_option_is_documented_with_its_default() {
    for kind in kinds() {
        let name = kind.name;
        let documented: Vec<&str> = kind.keys.iter().map(|key| key.name).collect();
        let is_alias = |field: &&&str| kind.keys.iter().any(|key| key.aliases.contains(*field));
        let (aliases, fields): (Vec<&str>, Vec<&str>) = kind.fields().iter().partition(is_alias);
        assert_eq!(documented, fields, "the keys of `{name}`");
        assert_eq!(kind.keys.iter().map(|key| key.aliases.len()).sum::<usize>(), aliases.len());
        let defaults = kind.keys.iter().filter(|key| !key.default.is_empty());
        let lines: String = defaults.fold(String::new(), |mut lines, key| {
            writeln!(lines, "{} = {}", key.name, key.default).unwrap();
            lines
        });
        let written: toml::Table = lines.parse().unwrap();
        let layer = LayerDefinition::new(name, serde_json::to_value(written).unwrap());
        let (origins, mut problems) = (Origins::default(), Problems::default());
        let options = Options::new(&layer, 0, &origins, None);
        let complete = kind.complete(&options.written(), &mut problems).unwrap();
        assert_eq!(problems.0, [], "the defaults of `{name}`");
        assert_eq!(complete, kind.complete_default(), "the defaults of `{name}`");
    }
}

#[test]
fn a_layer_is_the_same_from_toml_json_and_flags() {
    let kinds: Vec<&str> = kinds().map(|kind| kind.name).collect();
    let expected = [
        "tap",
        "classify",
        "patterns",
        "lifetimes",
        "swap-watch",
        "delay",
        "fault",
        "limit",
        "schedule",
        "cache",
        "log",
        "wal",
        "offload",
    ];
    assert_eq!(kinds, expected);
    let json = serde_json::json!({ "kind": "delay", "time": "5ms", "operations": "read" });
    let mut layers = [serde_json::from_value::<LayerDefinition>(json).unwrap()];
    let mut problems = Problems::default();
    complete(&mut layers, &Origins::default(), None, &mut problems);
    assert_eq!(problems.0, []);
    let expected = serde_json::json!({
        "kind": "delay", "time": "5ms", "jitter": "0", "operations": ["read"], "seed": 0,
    });
    assert_eq!(serde_json::to_value(&layers[0]).unwrap(), expected);
}
