//! The tables that describe a disk and an NBD listener.

use fathom_block::Operation;
use fathom_control::{
    Bytes, DelayDefinition, DiskDefinition, ExportsDefinition, FaultDefinition, FaultEffect,
    ImageFormat, LayerDefinition, ListenerDefinition, LogDefinition, ModelDefinition, ModelKind,
    Nanoseconds, TlsDefinition, VhostUserDefinition, WalDefinition, WhenFull,
};

use super::problem::Places;
use super::table::{Table, suggestion};

/// The most that counts, seeds and the like may be.
const ANY: std::ops::Range<u64> = 0..u64::MAX;

/// `[[disk]]`.
pub(super) fn disk(mut table: Table<'_>) -> (DiskDefinition, Places) {
    let mut disk = DiskDefinition {
        name: table.string("name").unwrap_or_default(),
        vm: table.string("vm").unwrap_or_default(),
        serial: table.string("serial").unwrap_or_default(),
        image: table.path("image"),
        format: table.word("format", &[("raw", ImageFormat::Raw)]),
        memory: table.bytes("memory").map(Bytes),
        null: table.bytes("null").map(Bytes),
        direct: table.boolean("direct").unwrap_or(false),
        read_only: table.boolean("read_only").unwrap_or(false),
        when_full: table
            .word("when_full", &[("fail", WhenFull::Fail), ("wait", WhenFull::Wait)])
            .unwrap_or_default(),
        block_size: table.bytes("block_size").map(Bytes),
        tap: table.boolean("tap").unwrap_or(true),
        classify: table.boolean("classify").unwrap_or(true),
        class_bounds: table
            .sizes("class_bounds")
            .map(|sizes| sizes.into_iter().map(Bytes).collect()),
        ..DiskDefinition::default()
    };
    for inner in table.tables("layers", "{ kind = \"…\" }") {
        disk.layers.extend(layer(inner));
    }
    disk.model = table.table("model", "`model`").map(model);
    if let Some(inner) = table.table("vhost_user", "[disk.vhost_user]") {
        let (definition, places) = vhost_user(inner);
        disk.vhost_user = Some(definition);
        table.adopt(places);
    }
    (disk, table.finish())
}

fn vhost_user(mut table: Table<'_>) -> (VhostUserDefinition, Places) {
    let default = VhostUserDefinition::default();
    let socket = table.path("socket");
    if socket.is_none() && table.place_of("socket") == table.place() {
        table.problem(
            table.place(),
            "[disk.vhost_user] names no socket",
            "add a line like `socket = \"/run/fathom/disk.sock\"`",
        );
    }
    let definition = VhostUserDefinition {
        socket: socket.unwrap_or_default(),
        queues: table
            .integer("queues", 1..257)
            .and_then(|queues| u16::try_from(queues).ok())
            .unwrap_or(default.queues),
        threads: table.integer("threads", 1..257).and_then(|threads| u16::try_from(threads).ok()),
        spin: table.nanoseconds("spin").map(Nanoseconds),
        group: table.string("group"),
    };
    (definition, table.finish())
}

fn model(mut table: Table<'_>) -> ModelDefinition {
    let words =
        [("hdd", ModelKind::Hdd), ("ssd", ModelKind::Ssd), ("sata-ssd", ModelKind::SataSsd)];
    let kind = required_kind(&mut table, &words).unwrap_or_default();
    let seed = table.integer("seed", ANY).unwrap_or(0);
    let mut model = ModelDefinition { kind, seed, ..ModelDefinition::default() };
    match kind {
        ModelKind::Hdd => {
            model.spanning = table.boolean("spanning").unwrap_or(false);
            model.write_cache = table.bytes("write_cache").map(Bytes);
        }
        ModelKind::Ssd | ModelKind::SataSsd => {
            model.power_loss_protected = table.boolean("power_loss_protected").unwrap_or(false);
        }
    }
    table.finish();
    model
}

fn required_kind<T: Copy>(table: &mut Table<'_>, words: &[(&'static str, T)]) -> Option<T> {
    let kind = table.word("kind", words);
    if kind.is_none() && table.place_of("kind") == table.place() {
        let example = format!("add `kind = \"{}\"`", words[0].0);
        table.problem(table.place(), "no `kind` is named here", &example);
    }
    kind
}

fn layer(mut table: Table<'_>) -> Option<LayerDefinition> {
    #[derive(Clone, Copy)]
    enum Kind {
        Classify,
        Tap,
        Delay,
        Fault,
        Log,
        Wal,
    }
    let words = [
        ("delay", Kind::Delay),
        ("fault", Kind::Fault),
        ("log", Kind::Log),
        ("tap", Kind::Tap),
        ("classify", Kind::Classify),
        ("wal", Kind::Wal),
    ];
    // Without a kind nothing can be said about the other keys.
    let definition = match required_kind(&mut table, &words)? {
        Kind::Classify => LayerDefinition::Classify,
        Kind::Tap => LayerDefinition::Tap,
        Kind::Delay => LayerDefinition::Delay(DelayDefinition {
            time: Nanoseconds(table.nanoseconds("time").unwrap_or(0)),
            jitter: Nanoseconds(table.nanoseconds("jitter").unwrap_or(0)),
            operations: operations(&mut table),
            seed: table.integer("seed", ANY).unwrap_or(0),
        }),
        Kind::Fault => fault(&mut table),
        Kind::Log => {
            let default = LogDefinition::default().lines_per_second_max;
            let lines = table.integer("lines_per_second_max", 0..1_000_001);
            LayerDefinition::Log(LogDefinition {
                lines_per_second_max: lines.unwrap_or(default),
                file: table.path("file"),
            })
        }
        Kind::Wal => {
            let default = WalDefinition::default();
            LayerDefinition::Wal(WalDefinition {
                log: table.path("log").unwrap_or_default(),
                offset: Bytes(table.bytes("offset").unwrap_or(0)),
                size: table.bytes("size").map(Bytes),
                age: table.nanoseconds("age").map_or(default.age, Nanoseconds),
                model: table.table("model", "`model`").map(model),
            })
        }
    };
    table.finish();
    Some(definition)
}

fn fault(table: &mut Table<'_>) -> LayerDefinition {
    let default = FaultDefinition::default();
    let effects = [
        ("refused", FaultEffect::Refused),
        ("late", FaultEffect::Late),
        ("short", FaultEffect::Short),
        ("torn", FaultEffect::Torn),
    ];
    LayerDefinition::Fault(FaultDefinition {
        effect: table.word("effect", &effects).unwrap_or_default(),
        rate: table.number("rate").unwrap_or(default.rate),
        operations: operations(table),
        offset: Bytes(table.bytes("offset").unwrap_or(0)),
        length: Bytes(table.bytes("length").unwrap_or(0)),
        after: table.integer("after", ANY).unwrap_or(0),
        strikes_max: table.integer("strikes_max", ANY),
        seed: table.integer("seed", ANY).unwrap_or(0),
    })
}

fn operations(table: &mut Table<'_>) -> Vec<String> {
    let names = table.strings("operations").unwrap_or_default();
    let known: Vec<&str> = Operation::ALL.iter().map(|operation| operation.name()).collect();
    for name in &names {
        if !known.contains(&name.as_str()) {
            let message = format!("{name:?} is no operation");
            table.problem(table.place_of("operations"), message, &suggestion(name, &known));
        }
    }
    names
}

/// `[[nbd]]`.
pub(super) fn listener(mut table: Table<'_>) -> (ListenerDefinition, Places) {
    let mut address = table.string("address").unwrap_or_default();
    if let Some(path) = address.strip_prefix("unix:") {
        address = format!("unix:{}", table.resolve(path).display());
    }
    let exports = match table.strings("exports") {
        None => ExportsDefinition::All,
        Some(names) if names == ["all"] => ExportsDefinition::All,
        Some(names) => ExportsDefinition::Named(names),
    };
    let plain_allowed = table.boolean("plain_allowed").unwrap_or(false);
    let group = table.string("group");
    let tls = table.table("tls", "[nbd.tls]").map(|mut inner| {
        let definition = TlsDefinition {
            certificate: inner.path("certificate"),
            key: inner.path("key"),
            client_ca: inner.path("client_ca"),
            psk: inner.path("psk"),
        };
        let places = inner.finish();
        table.adopt(places);
        definition
    });
    (ListenerDefinition { address, exports, tls, plain_allowed, group }, table.finish())
}
