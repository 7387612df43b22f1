//! A store in memory, which is left and found again.

use std::collections::HashMap;
use std::os::unix::fs::FileExt;

use tempfile::TempDir;

use super::*;

const PAGES: u64 = 600;

fn own() -> Vmm {
    Vmm::open(std::process::id() as i32).unwrap()
}

fn memory() -> Vec<MappedMemory> {
    let part = |start, length, inode| MappedMemory {
        start,
        end: start + length,
        offset: PAGE,
        inode,
        device: 5,
    };
    vec![part(1 << 30, 100 * PAGE, 1), part(2 << 30, (PAGES - 100) * PAGE, 2)]
}

fn scene() -> (TempDir, PageStore) {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let store = PageStore::create(&folder.path().join("store"), &own(), &memory(), None).unwrap();
    (folder, store)
}

/// Content that can be made smaller to some degree.
fn content(random: &mut fastrand::Rng) -> Page {
    let mut page = [random.u8(..); PAGE as usize];
    let varied = random.usize(0..=PAGE as usize);
    random.fill(&mut page[..varied]);
    page
}

fn get(store: &PageStore, page: u64) -> Option<Page> {
    let mut found = [0xcc; PAGE as usize];
    match store.get(page, &mut found) {
        Found::Content => Some(found),
        Found::Nothing => None,
        Found::InFile => panic!("page {page} is in a file"),
        Found::Damaged => panic!("page {page} is damaged"),
    }
}

#[test]
fn pages_come_back_as_they_were_also_from_a_store_that_was_left() {
    let (_folder, mut store) = scene();
    let mut random = fastrand::Rng::with_seed(9);
    let mut model: HashMap<u64, Page> = HashMap::new();
    for step in 0..6000 {
        let page = random.u64(..PAGES);
        if random.u8(..) < 90 {
            store.remove(page);
            model.remove(&page);
        } else {
            let content = content(&mut random);
            match store.put(page, &content) {
                Stored::Yes => drop(model.insert(page, content)),
                // What was there before has gone.
                Stored::Incompressible => drop(model.remove(&page)),
                Stored::Full => panic!("full"),
            }
        }
        assert_eq!(get(&store, page), model.get(&page).copied(), "{step}");
        if step % 1000 == 999 {
            let path = store.path().to_owned();
            let before = (store.bytes(), store.entries());
            drop(store);
            store = PageStore::open(&path, &own(), None).unwrap();
            // Each tenth page is not away any more.
            let gone = |page: u64| step % 2000 == 999 && page % 10 == 3;
            store.recover(|page| !gone(page));
            if step % 2000 != 999 {
                assert_eq!((store.bytes(), store.entries()), before);
            }
            model.retain(|page, _| !gone(*page));
            for page in 0..PAGES {
                assert_eq!(get(&store, page), model.get(&page).copied(), "{page} after {step}");
            }
        }
    }
    assert!(!model.is_empty());
    (0..PAGES).for_each(|page| store.remove(page));
    assert_eq!((store.bytes(), store.entries()), (0, (0, 0)));
    let held = store.file.metadata().unwrap().blocks() * 512;
    assert_eq!(held, data_offset(PAGES), "memory is not given back");
    let path = store.path().to_owned();
    store.end();
    assert!(!path.exists());
}

#[test]
fn pages_of_one_number_take_no_memory_and_noise_stays() {
    let (_folder, mut store) = scene();
    let mut page = [0; PAGE as usize];
    assert_eq!(store.put(0, &page), Stored::Yes);
    page.chunks_exact_mut(4).for_each(|word| word.copy_from_slice(&[1, 2, 3, 4]));
    assert_eq!(store.put(1, &page), Stored::Yes);
    assert_eq!((store.bytes(), store.entries()), (0, (2, 0)));
    assert_eq!(get(&store, 1), Some(page));
    assert_eq!(get(&store, 0), Some([0; PAGE as usize]));
    page[4095] = 5;
    assert_eq!(store.put(1, &page), Stored::Yes);
    assert_eq!((store.bytes(), store.entries()), (CHUNK, (1, 1)));
    fastrand::Rng::with_seed(1).fill(&mut page);
    assert_eq!(store.put(1, &page), Stored::Incompressible);
    assert_eq!((get(&store, 1), store.bytes()), (None, 0));
    assert_eq!(store.put(PAGES, &[0; PAGE as usize]), Stored::Full, "there is no such page");
}

/// A flipped bit of a content, and any other entry, is damage or another page's content with its
/// own checksum: never a wrong page.
#[test]
fn damage_is_found() {
    let (_folder, mut store) = scene();
    let mut random = fastrand::Rng::with_seed(2);
    let mut pages = HashMap::new();
    for page in 0..50 {
        let content = content(&mut random);
        if store.put(page, &content) == Stored::Yes {
            pages.insert(page, content);
        }
    }
    let mut target = [0; PAGE as usize];
    let start = data_offset(PAGES);
    let mut damaged = 0;
    for (page, content) in &pages {
        let Entry::Packed { place, length } = store.entry(*page) else { continue };
        let at = start + place * UNIT + random.u64(..length as u64);
        let mut byte = [0];
        store.file.read_exact_at(&mut byte, at).unwrap();
        store.file.write_all_at(&[byte[0] ^ 1 << random.u8(..8)], at).unwrap();
        match store.get(*page, &mut target) {
            Found::Damaged => damaged += 1,
            // A bit that LZ4 does not use.
            Found::Content => assert_eq!(target, *content),
            Found::Nothing | Found::InFile => panic!("an entry has gone"),
        }
        store.file.write_all_at(&byte, at).unwrap();
        assert_eq!(get(&store, *page), Some(*content));
    }
    assert!(damaged > 10, "{damaged}");
    for _ in 0..20_000 {
        let page = random.u64(..50);
        let word = random.u64(..) >> random.u32(..64);
        store.set_number(HEADER + page as usize, word);
        let found = store.get(page, &mut target);
        if matches!(Entry::decode(word), Entry::Packed { .. }) && found == Found::Content {
            assert_eq!(Some(&target), pages.get(&page));
        }
    }
    // It is recovered whatever it says, and works.
    store.recover(|_| true);
    for page in 100..PAGES {
        let content = content(&mut random);
        if store.put(page, &content) == Stored::Yes {
            assert_eq!(get(&store, page), Some(content));
        }
    }
}

#[test]
fn a_store_of_something_else_is_refused() {
    let (folder, store) = scene();
    let path = store.path().to_owned();
    drop(store);
    let refused = |offset: usize, value: u64| {
        let file = File::options().read(true).write(true).open(&path).unwrap();
        let mut before = [0; 8];
        file.read_exact_at(&mut before, offset as u64 * 8).unwrap();
        file.write_all_at(&value.to_ne_bytes(), offset as u64 * 8).unwrap();
        let text = PageStore::open(&path, &own(), None).unwrap_err().to_string();
        file.write_all_at(&before, offset as u64 * 8).unwrap();
        text
    };
    assert!(refused(AT_MAGIC, 1).contains("no store"));
    assert!(refused(AT_VERSION, 1).contains("another version"));
    for (at, value) in [
        (AT_START, 1),
        (AT_PROCESS, 1),
        (AT_PAGES, 7),
        (AT_PAGES, u64::MAX),
        (AT_SWAP_SLOTS, u64::MAX),
    ] {
        assert!(refused(at, value).contains("another machine"));
    }
    for (at, value) in [(AT_PARTS, 99), (AT_PARTS, u64::MAX), (AT_PART + 3, u64::MAX)] {
        assert!(refused(at, value).contains("damaged"));
    }
    assert_eq!(PageStore::open(&path, &own(), None).unwrap().parts().len(), 2);
    let folder = folder.path().join("store");
    remove_stale(&folder);
    assert!(path.exists(), "its machine runs");
    let of_others = folder.join("7-1-5.pages");
    fs::write(&of_others, "").unwrap();
    let stale = folder.join(format!("{}-1-5.pages", vmm::namespace()));
    fs::write(&stale, "").unwrap();
    remove_stale(&folder);
    assert!(path.exists() && of_others.exists() && !stale.exists());
    let open = tempfile::tempdir_in("/dev/shm").unwrap();
    fs::set_permissions(open.path(), std::os::unix::fs::PermissionsExt::from_mode(0o777)).unwrap();
    PageStore::create(open.path(), &own(), &memory(), None).unwrap_err();
}
