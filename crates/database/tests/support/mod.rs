//! Pages of real databases, captured by `scripts/database-pages`.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use fathom_database::DatabasePart;

/// A captured page.
#[derive(Clone)]
pub struct Captured {
    /// Its number in its file.
    pub number: u32,
    /// What the database says of it: its part, and the number of its table or index; `None` if it
    /// does not tell.
    pub truth: Option<(DatabasePart, u64)>,
    /// Its bytes. Those that no parser reads are zero.
    pub bytes: Vec<u8>,
}

/// A captured file.
#[derive(Clone)]
pub struct File {
    /// Its path below the database's folder.
    pub path: String,
    /// Its pages, or some of them, in order.
    pub pages: Vec<Captured>,
}

/// All captures whose names begin with `prefix`, by name.
pub fn captures(prefix: &str) -> BTreeMap<String, Vec<File>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../database/tests/pages");
    let files = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let name = |path: &PathBuf| path.file_stem().unwrap().to_string_lossy().into_owned();
    files
        .filter(|path| name(path).starts_with(prefix))
        .map(|path| (name(&path), parse(&fs::read_to_string(&path).unwrap())))
        .collect()
}

fn parse(text: &str) -> Vec<File> {
    let mut files: Vec<File> = Vec::new();
    let mut length = 0;
    for line in text.lines() {
        let words: Vec<&str> = line.split(' ').collect();
        match words[..] {
            ["#", ..] => {}
            ["file", path, page_length] => {
                files.push(File { path: path.to_owned(), pages: Vec::new() });
                length = page_length.parse().unwrap();
            }
            ["page", number, part, index] => {
                let part = DatabasePart::ALL.into_iter().find(|known| known.name() == part);
                let truth = part.map(|part| (part, index.parse().unwrap()));
                let page =
                    Captured { number: number.parse().unwrap(), truth, bytes: vec![0; length] };
                files.last_mut().unwrap().pages.push(page);
            }
            [place, hex] => {
                let page = files.last_mut().unwrap().pages.last_mut().unwrap();
                let place: usize = place.parse().unwrap();
                for (byte, digits) in page.bytes[place..].iter_mut().zip(hex.as_bytes().chunks(2)) {
                    *byte = u8::from_str_radix(std::str::from_utf8(digits).unwrap(), 16).unwrap();
                }
            }
            _ => panic!("a line of an unknown form: {line}"),
        }
    }
    files
}
