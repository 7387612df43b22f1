//! Checks ARCHITECTURE.md. Its table of crates must name every crate with its exact dependencies,
//! each crate before those that it depends on. Its rule on unsafe code must name exactly the
//! modules that contain any.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// The prefix of the names of this workspace's packages.
const PREFIX: &str = "fathom-";

/// A row of the table of crates.
struct Row {
    name: String,
    dependencies: BTreeSet<String>,
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn architecture() -> String {
    fs::read_to_string(root().join("ARCHITECTURE.md")).unwrap()
}

/// The parts of `text` between backticks.
fn quoted(text: &str) -> BTreeSet<String> {
    text.split('`').skip(1).step_by(2).map(str::to_owned).collect()
}

/// The rows of the table in the section "Crates", in order.
fn table() -> Vec<Row> {
    let page = architecture();
    let section = page.split("\n## Crates\n").nth(1).expect("the page has a section on crates");
    let section = section.split("\n## ").next().unwrap();
    let mut lines = section.lines().filter(|line| line.starts_with('|'));
    let heading: Vec<&str> = lines.next().unwrap().split('|').map(str::trim).collect();
    let place = |name: &str| {
        heading.iter().position(|cell| *cell == name).unwrap_or_else(|| panic!("no column {name}"))
    };
    let (name, dependencies) = (place("crate"), place("depends on"));
    lines
        .skip(1)
        .map(|line| {
            let cells: Vec<&str> = line.split('|').collect();
            Row {
                name: quoted(cells[name]).pop_first().expect("a row names its crate"),
                dependencies: quoted(cells[dependencies]),
            }
        })
        .collect()
}

/// The dependencies within the workspace that each crate's manifest states, by crate.
fn manifests() -> BTreeMap<String, BTreeSet<String>> {
    let crates = fs::read_dir(root().join("crates")).unwrap();
    crates
        .map(|entry| {
            let folder = entry.unwrap().path();
            let text = fs::read_to_string(folder.join("Cargo.toml")).unwrap();
            let manifest: toml::Table = text.parse().unwrap();
            let dependencies = manifest
                .get("dependencies")
                .and_then(toml::Value::as_table)
                .into_iter()
                .flat_map(toml::Table::keys)
                .filter_map(|name| name.strip_prefix(PREFIX))
                .map(str::to_owned)
                .collect();
            (folder.file_name().unwrap().to_string_lossy().into_owned(), dependencies)
        })
        .collect()
}

#[test]
fn every_crate_has_its_row_with_its_dependencies() {
    let mut rows: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for row in table() {
        assert!(
            rows.insert(row.name.clone(), row.dependencies).is_none(),
            "{}: two rows",
            row.name
        );
    }
    let manifests = manifests();
    assert_eq!(
        rows.keys().collect::<Vec<_>>(),
        manifests.keys().collect::<Vec<_>>(),
        "the rows of ARCHITECTURE.md and the folders below crates/"
    );
    for (name, dependencies) in &manifests {
        assert_eq!(&rows[name], dependencies, "the dependencies of `{name}`");
    }
}

#[test]
fn every_crate_is_listed_before_its_dependencies() {
    let rows = table();
    for (index, row) in rows.iter().enumerate() {
        for above in &rows[..index] {
            assert!(
                !row.dependencies.contains(&above.name),
                "`{}` depends on `{}`, which is listed before it",
                row.name,
                above.name
            );
        }
    }
}

#[test]
fn unsafe_code_is_allowed_only_where_the_page_allows_it() {
    let page = architecture();
    let rule = page.split("\n- **Unsafe code**").nth(1).expect("the page has a rule on it");
    let rule = rule.split("\n- **").next().unwrap().split("\n## ").next().unwrap();
    // The text after the names is prose.
    let named = quoted(rule.split(". ").next().unwrap());
    let workspace = fs::read_to_string(root().join("Cargo.toml")).unwrap();
    let workspace: toml::Table = workspace.parse().unwrap();
    assert_eq!(workspace["workspace"]["lints"]["rust"]["unsafe_code"].as_str(), Some("deny"));
    let mut allowed = BTreeSet::new();
    for name in manifests().into_keys() {
        let folder = root().join("crates").join(&name);
        let manifest = fs::read_to_string(folder.join("Cargo.toml")).unwrap();
        assert!(
            manifest.contains("[lints]\nworkspace = true\n"),
            "{name}: the lints of the workspace"
        );
        let before = allowed.len();
        let mut root_forbids = false;
        for file in sources(&folder.join("src")) {
            let text = fs::read_to_string(&file).unwrap();
            let module = module(&name, file.strip_prefix(folder.join("src")).unwrap());
            root_forbids |= module == name && text.contains("#![forbid(unsafe_code)]");
            // Line breaks do not matter.
            let text: String = text.split_whitespace().collect();
            let excepted = ["allow", "expect"].map(|level| format!("[{level}(unsafe_code"));
            if excepted.iter().any(|attribute| text.contains(attribute)) {
                allowed.insert(module);
            }
        }
        assert!(
            root_forbids || allowed.len() > before,
            "{name} has no unsafe code and does not forbid it"
        );
    }
    assert_eq!(allowed, named, "the modules with unsafe code");
}

/// The Rust files below `folder`.
fn sources(folder: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files.extend(sources(&path));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
    files
}

/// The module of the file at `path` below a crate's `src`.
fn module(name: &str, path: &Path) -> String {
    let parts = path.with_extension("");
    let parts = parts.iter().map(|part| part.to_str().unwrap());
    let parts = parts.filter(|part| !["lib", "main", "mod"].contains(part));
    std::iter::once(name).chain(parts).collect::<Vec<_>>().join("::")
}

/// What the oldest supported compiler, that of Debian 12 and 13, does not have, and newer ones
/// accept without a warning: chains of `let` in conditions, and parts of the standard library. This
/// list has what was used by mistake.
#[test]
fn the_code_is_for_the_oldest_compiler() {
    let newer = [
        ("&& let ", "a chain of `let`"),
        ("|| let ", "a chain of `let`"),
        (".cast_signed()", "1.87"),
        (".cast_unsigned()", "1.87"),
    ];
    let (crates, tests) = (root().join("crates"), root().join("tests"));
    let mut found = Vec::new();
    for path in sources(&crates).into_iter().chain(sources(&tests)) {
        if path.ends_with("fathom/tests/architecture.rs") {
            continue;
        }
        let text = fs::read_to_string(&path).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        for (index, line) in lines.iter().enumerate() {
            let line = line.trim_start();
            if line.starts_with("//") {
                continue;
            }
            let place = || format!("{}:{}", path.display(), index + 1);
            for (part, what) in newer {
                if line.contains(part) {
                    found.push(format!("{}: {what}", place()));
                }
            }
            // `if let … = …` whose condition goes on in the next line.
            let begins = line.starts_with("if let ") || line.starts_with("} else if let ");
            let next = lines.get(index + 1).map(|next| next.trim_start()).unwrap_or_default();
            if begins && !line.ends_with('{') && next.starts_with("&& ") {
                found.push(format!("{}: a chain of `let`", place()));
            }
        }
    }
    assert!(found.is_empty(), "{found:#?}");
}

/// The modules of `crates/layers/src` that are no layers: any layer may use them.
const NO_LAYERS: [&str; 6] =
    ["bucket", "change_notes", "guest_pages", "kind", "opened", "passthrough"];
/// The layers that are made of another one.
const MADE_OF: [(&str, &str); 1] = [("offload", "wal")];

/// No layer knows another one, so that each can be left out, added or replaced by itself.
#[test]
fn no_layer_imports_another_but_what_it_is_made_of() {
    let folder = root().join("crates/layers/src");
    let library = fs::read_to_string(folder.join("lib.rs")).unwrap();
    let modules: BTreeSet<&str> =
        library.lines().filter_map(|line| line.split("mod ").nth(1)?.strip_suffix(';')).collect();
    assert!(modules.contains("wal") && NO_LAYERS.iter().all(|name| modules.contains(name)));
    let mut found = BTreeSet::new();
    for path in sources(&folder) {
        let inner = path.strip_prefix(&folder).unwrap();
        let first = inner.iter().next().unwrap().to_str().unwrap();
        let layer = first.strip_suffix(".rs").unwrap_or(first);
        if !modules.contains(layer) || NO_LAYERS.contains(&layer) {
            continue;
        }
        let text = fs::read_to_string(&path).unwrap();
        let code = text.lines().filter(|line| !line.trim_start().starts_with("//"));
        for part in code.flat_map(|line| line.split("crate::").skip(1)) {
            let end = part.find(|it: char| !it.is_alphanumeric() && it != '_');
            let other = &part[..end.unwrap_or(part.len())];
            if modules.contains(other) && other != layer && !NO_LAYERS.contains(&other) {
                found.insert((layer.to_owned(), other.to_owned()));
            }
        }
    }
    let known = MADE_OF.map(|(layer, other)| (layer.to_owned(), other.to_owned()));
    assert_eq!(found, BTreeSet::from(known));
}

/// The features of the daemon whose folders have no `feature.rs`: they serve others and have no
/// part of their own in the life of the daemon.
const NO_FEATURES: [&str; 1] = ["keep"];

/// What the code of a file names directly below `features::`, also in a list of imports.
fn features_named_in(file: &Path) -> BTreeSet<String> {
    let text = fs::read_to_string(file).unwrap();
    let code = text.lines().filter(|line| !line.trim_start().starts_with("//"));
    let code = code.collect::<Vec<_>>().join("\n");
    let name = |part: &str| {
        let part = part.trim_start();
        let end = part.find(|it: char| !it.is_alphanumeric() && it != '_');
        part[..end.unwrap_or(part.len())].to_owned()
    };
    let names = code.split("features::").skip(1).flat_map(|part| match part.strip_prefix('{') {
        Some(list) => list.split(';').next().unwrap().split(',').map(name).collect(),
        None => vec![name(part)],
    });
    names.collect()
}

/// The features that each feature of the daemon imports.
fn imports_of_features() -> BTreeMap<String, BTreeSet<String>> {
    let folder = root().join("crates/server/src/features");
    let mut graph = BTreeMap::new();
    for entry in fs::read_dir(&folder).unwrap() {
        let path = entry.unwrap().path();
        if !path.is_dir() {
            continue;
        }
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        let mut others = BTreeSet::new();
        for file in sources(&path) {
            others.extend(features_named_in(&file));
        }
        others.retain(|other| *other != name && folder.join(other).is_dir());
        graph.insert(name, others);
    }
    graph
}

/// A feature of the daemon can be read, changed and left out with those that it stands on.
#[test]
fn features_stand_on_each_other_without_a_circle() {
    let graph = imports_of_features();
    let mut left = graph.clone();
    while !left.is_empty() {
        let names: BTreeSet<String> = left.keys().cloned().collect();
        let before = left.len();
        left.retain(|_, others| others.iter().any(|other| names.contains(other)));
        assert!(left.len() < before, "a circle among {left:#?}");
    }
    let table = fs::read_to_string(root().join("crates/server/src/features/mod.rs")).unwrap();
    for name in graph.keys().filter(|name| !NO_FEATURES.contains(&name.as_str())) {
        assert!(table.contains(&format!("    &{name}::feature::")), "`{name}` is not in FEATURES");
    }
}

/// What the parts of the daemon that serve features know of one by name, by file. It is mostly the
/// log of a disk: which definition of a disk applies after a crash depends on the log with its
/// changes. And the store of a disk at a server leaves its connection to a later daemon.
/// A new feature does not come here.
const KNOWN_BY_NAME: [(&str, &str); 7] = [
    ("configuration/layers/mod.rs", "log"),
    ("daemon/disks.rs", "cache"),
    ("daemon/lasting/mod.rs", "log"),
    ("daemon/lasting/start.rs", "log"),
    ("daemon/overlay/decide.rs", "log"),
    ("daemon/problems.rs", "log"),
    ("stores/kept.rs", "keep"),
];

/// The daemon calls its features through the table, so that a new one touches no file but its own.
#[test]
fn the_daemon_knows_features_by_their_table() {
    let folder = root().join("crates/server/src");
    let mut found = BTreeSet::new();
    for part in ["daemon", "configuration", "stores"] {
        for file in sources(&folder.join(part)) {
            let name = file.strip_prefix(&folder).unwrap().to_str().unwrap().to_owned();
            let features = features_named_in(&file).into_iter();
            let features = features.filter(|it| folder.join("features").join(it).is_dir());
            found.extend(features.map(|feature| (name.clone(), feature)));
        }
    }
    let known = KNOWN_BY_NAME.map(|(file, feature)| (file.to_owned(), feature.to_owned()));
    assert_eq!(found, BTreeSet::from(known));
}

/// How many types may have the same name, if other modules use them.
const NAMESAKES_MAX: usize = 2;
/// Names that more types have.
const NAMESAKES: [(&str, &str); 2] = [
    ("Owner", "the type of `persistence`, with the length of a home's name in each format"),
    ("Superblock", "the trait of `persistence`, and the superblock of each format"),
];

/// The type that a line declares for other modules.
fn declared_type(line: &str) -> Option<&str> {
    let line = line.trim_start();
    let rest = line.strip_prefix("pub ").or_else(|| line.strip_prefix("pub(crate) "))?;
    let kinds = ["struct ", "enum ", "trait ", "type "];
    let rest = kinds.iter().find_map(|kind| rest.strip_prefix(kind))?;
    let name = &rest[..rest.find(|it: char| !it.is_alphanumeric()).unwrap_or(rest.len())];
    // A macro's declaration has no name yet.
    Some(name).filter(|name| !name.is_empty())
}

/// A type that leaves its module says what it is: twelve types called `Place` say nothing.
#[test]
fn types_that_other_modules_use_have_names_of_their_own() {
    assert_eq!(declared_type("pub(crate) struct Place<'a> {"), Some("Place"));
    assert_eq!(
        declared_type("    pub type Owner = fathom_persistence::Owner<256>;"),
        Some("Owner")
    );
    assert_eq!(declared_type("struct Place {"), None);
    let mut declared: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for path in sources(&root().join("crates")) {
        let place = path.to_str().unwrap();
        if !place.contains("/src/") {
            continue;
        }
        let text = fs::read_to_string(&path).unwrap();
        for name in text.lines().filter_map(declared_type) {
            declared.entry(name.to_owned()).or_default().push(place.to_owned());
        }
    }
    assert!(declared.len() > 500);
    declared.retain(|_, places| places.len() > NAMESAKES_MAX);
    for (name, reason) in NAMESAKES {
        assert!(declared.remove(name).is_some(), "few types are called `{name}` now ({reason})");
    }
    assert!(declared.is_empty(), "{declared:#?}");
}

/// The documentation of each crate names the first thing to read, which exists, and what the crate
/// must not know.
#[test]
fn crates_say_where_to_begin() {
    for entry in std::fs::read_dir(root().join("crates")).unwrap() {
        let path = entry.unwrap().path().join("src/lib.rs");
        let Ok(text) = std::fs::read_to_string(&path) else { continue };
        let lines = text.lines().take_while(|line| line.starts_with("//!"));
        let words: String = lines.flat_map(|line| [line[3..].trim(), " "]).collect();
        let paragraph = words.split("Read [`").nth(1);
        let (name, rest) =
            paragraph.and_then(|rest| rest.split_once("`] first. ")).unwrap_or_else(|| {
                panic!(
                    "{}: write \"Read [`NAME`] first. The crate must not know …\"",
                    path.display()
                )
            });
        assert!(!name.contains(' '), "{}: {name}", path.display());
        assert!(rest.starts_with("The crate must not know "), "{}", path.display());
    }
}

/// The methods that take a text apart or look into it.
const CUTS: [&str; 8] =
    ["split_once", "rsplit_once", "splitn", "split", "rsplit", "find", "rfind", "contains"];

/// Whether a line of code cuts a text where a remedy might begin, or fills in a name in a text: its
/// first argument has only capitals.
fn mends_a_text(line: &str) -> bool {
    let cuts = CUTS.iter().any(|cut| line.contains(&format!(".{cut}(\"; \"")));
    let fills = line.split(".replace(\"").skip(1).any(|rest| {
        let name = rest.split('"').next().unwrap();
        name.len() > 1 && name.chars().all(|it| it.is_ascii_uppercase() || it == '_')
    });
    cuts || fills
}

/// Message and remedy of a failure are two texts, and nobody mends one.
#[test]
fn failures_are_neither_cut_nor_mended() {
    assert!(mends_a_text("let (message, remedy) = text.split_once(\"; \").unwrap();"));
    assert!(mends_a_text("let remedy = remedy.replace(\"DISK\", disk);"));
    assert!(!mends_a_text("let text = lines.join(\"; \").replace('\\n', \" \");"));
    let mut found = Vec::new();
    for path in sources(&root().join("crates")) {
        let name = path.to_str().unwrap();
        if ["/tests/", "/tests.rs", "_tests.rs"].iter().any(|part| name.contains(part)) {
            continue;
        }
        let text = fs::read_to_string(&path).unwrap();
        let product = text.split("#[cfg(test)]\nmod tests {").next().unwrap();
        let lines = product.lines().enumerate().filter(|(_, line)| mends_a_text(line));
        found.extend(lines.map(|(index, _)| format!("{name}:{}", index + 1)));
    }
    assert!(found.is_empty(), "{found:#?}");
}

/// The widest comment, in columns.
const COMMENT_WIDTH_MAX: usize = 100;

/// Comments wrap where the code does. Tables and drawings may be wider.
#[test]
fn comments_wrap_at_100_columns() {
    let (crates, tests) = (root().join("crates"), root().join("tests"));
    let mut found = Vec::new();
    for path in sources(&crates).into_iter().chain(sources(&tests)) {
        let text = fs::read_to_string(&path).unwrap();
        let mut is_fenced = false;
        for (index, line) in text.lines().enumerate() {
            let comment = line.trim_start();
            let Some(words) = comment.strip_prefix("//") else {
                is_fenced = false;
                continue;
            };
            let words = words.trim_start_matches(['/', '!']);
            is_fenced ^= words.trim_start().starts_with("```");
            let is_drawn = is_fenced || words.starts_with(" |") || words.starts_with("  ");
            if !is_drawn && line.chars().count() > COMMENT_WIDTH_MAX {
                found.push(format!("{}:{}", path.display(), index + 1));
            }
        }
    }
    assert!(found.is_empty(), "{} wide comments: {found:#?}", found.len());
}

/// The negative controls of `scripts/mutants`: each fits the code, and each rule has one, or the
/// reason why it has none.
#[test]
fn mutants_fit_the_code() {
    let text = include_str!("mutants.toml");
    let table: toml::Table = text.parse().unwrap();
    let rows = |name: &str| table[name].as_array().unwrap().iter();
    let of = |row: &toml::Value, key: &str| row[key].as_str().unwrap().to_owned();
    let mut names = BTreeSet::new();
    for mutant in rows("mutant") {
        let (name, file, search) = (of(mutant, "name"), of(mutant, "file"), of(mutant, "search"));
        let code = fs::read_to_string(root().join(&file)).unwrap();
        assert_eq!(code.matches(&search).count(), 1, "{name}: its text is not once in {file}");
        let replacement = of(mutant, "replace");
        let mut words = replacement.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
        assert!(words.any(|word| word == "ON"), "{name} cannot be off");
        assert!(!of(mutant, "does").is_empty() && of(mutant, "test").contains("--"), "{name}");
        assert!(names.insert(name.clone()), "there are two mutants {name}");
    }
    let ruled: BTreeSet<_> = rows("mutant").map(|it| it["rule"].as_integer().unwrap()).collect();
    let mut rules = BTreeSet::new();
    for rule in rows("rule") {
        let number = rule["number"].as_integer().unwrap();
        assert!(rules.insert(number) && !of(rule, "text").is_empty());
        assert_ne!(ruled.contains(&number), rule.get("untested").is_some(), "rule {number}");
    }
    assert!(ruled.is_subset(&rules));
}
