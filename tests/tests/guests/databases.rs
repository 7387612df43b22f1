//! The parts of a database of SQLite, in a guest in which only SQLite itself was installed.

use fathom_control::{InsightState, UsageRow};
use fathom_tests::{Assets, Daemon, Disk, Guest, Result, patience, until};

/// The rows of a usage report for a part of a database: reads and writes in bytes.
fn moved(rows: &[UsageRow], path: &str, part: &str, index: Option<u64>) -> (u64, u64) {
    let is_its = |row: &&UsageRow| {
        row.path.ends_with(path)
            && row.database_part == part
            && index.is_none_or(|index| row.database_index == index)
    };
    let rows = rows.iter().filter(is_its);
    rows.fold((0, 0), |sum, row| (sum.0 + row.counts.read.bytes, sum.1 + row.counts.write.bytes))
}

/// A table with two indexes is made by an unmodified SQLite. Then one of the indexes is read, and
/// the reports name it.
#[test]
#[expect(clippy::too_many_lines, reason = "one scenario")]
fn the_hot_index_of_an_unmodified_database_is_known() -> Result<()> {
    let daemon = Daemon::start(|folder| {
        let path = |name: &str| folder.join(name).display().to_string();
        std::fs::File::create(folder.join("disk.img")).unwrap().set_len(256 << 20).unwrap();
        format!(
            "[[disk]]\nname = 'disk'\nimage = '{}'\nvhost_user.socket = '{}'\n",
            path("disk.img"),
            path("disk.sock")
        )
    })?;
    let guest = Guest::builder()
        .disk(Disk::vhost_user(daemon.path("disk.sock")))
        .disk(Disk::snapshot_of(Assets::get()?.tools()?))
        .start()?;
    guest.check(
        "mkdir /tools; mount -o ro /dev/vdb /tools
        mkfs.ext4 -q /dev/vda; mount /dev/vda /mnt",
    )?;
    until("the guest's kernel to be found", patience(60), || {
        guest.check("sync")?;
        Ok((daemon.status("disk")?.insight.state == InsightState::Attached).then_some(()))
    })?;
    // Not in one transaction: the journal is written too, and the first page often.
    let roots = guest.check(
        "/tools/sqlite3 /mnt/shop.db \"
        CREATE TABLE part (id INTEGER PRIMARY KEY, brand TEXT, size INTEGER, comment TEXT);
        WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 20000)
        INSERT INTO part SELECT i, 'Brand#' || (i * 7919 % 997), i * 31 % 1009, 'a comment for part ' || i FROM n;
        CREATE INDEX by_brand ON part (brand);
        CREATE INDEX by_size ON part (size);
        UPDATE part SET size = size + 1 WHERE id % 400 = 0;
        \"
        sync
        /tools/sqlite3 /mnt/shop.db \"SELECT group_concat(rootpage, ' ') FROM
            (SELECT rootpage FROM sqlite_schema ORDER BY name);\"",
    )?;
    let roots: Vec<u64> = roots.split_whitespace().map(|word| word.parse().unwrap()).collect();
    let [by_brand, by_size, part] = roots[..] else { panic!("three trees: {roots:?}") };
    let rows = || -> Vec<UsageRow> {
        let usage = daemon.client().usage(Some("disk"), None).unwrap();
        usage.disks.into_iter().flat_map(|disk| disk.rows).collect()
    };
    let before = rows();
    for row in before.iter().filter(|row| !row.database_system.is_empty()) {
        println!(
            "{} {} {}: read {} written {}",
            row.path,
            row.database_part,
            row.database_index,
            row.counts.read.bytes,
            row.counts.write.bytes
        );
    }
    let written = |part, index| moved(&before, "shop.db", part, index).1;
    let table = written("table", None);
    // About 20,000 rows of 40 bytes, and indexes of 15 bytes or more for each.
    assert!(table > 600 << 10, "{table} bytes of the table");
    assert!(written("index", None) > 400 << 10, "the indexes");
    let all = table + written("index", None) + written("other", None) + written("", None);
    assert!(written("other", None) + written("", None) < all / 10, "most pages are known");
    let log = moved(&before, "shop.db-journal", "log", None).1;
    assert!(log > 0, "the journal");
    // Only an index that has all columns of the query is read. The kernel would read ahead into the
    // other one, whose pages follow in the file.
    guest.check(
        "echo 0 > /sys/block/vda/queue/read_ahead_kb
        echo 3 > /proc/sys/vm/drop_caches
        /tools/sqlite3 /mnt/shop.db \"SELECT count(DISTINCT brand), max(brand) FROM part INDEXED BY by_brand;\"",
    )?;
    let after = rows();
    let read = |part, index| {
        moved(&after, "shop.db", part, index).0 - moved(&before, "shop.db", part, index).0
    };
    println!(
        "read: by_brand {}, by_size {}, part {}, all indexes {}, all tables {}",
        read("index", Some(by_brand)),
        read("index", Some(by_size)),
        read("table", Some(part)),
        read("index", None),
        read("table", None)
    );
    let hot = read("index", Some(by_brand));
    assert!(hot > 150 << 10, "{hot} bytes of the hot index");
    assert!(hot > 3 * read("index", Some(by_size)), "the other index is not read");
    // The list for operators names the hot index first of those that were read.
    let output = daemon.command(&["files", "disk", "--databases", "--sort", "read", "--json"])?;
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let first = &report["files"][0];
    assert_eq!(first["database_part"], "index", "{first}");
    assert_eq!(first["database_index"], by_brand, "{first}");
    assert_eq!(first["database_system"], "sqlite", "{first}");
    let output = daemon.command(&["files", "disk", "--databases", "--sort", "read"])?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    println!("{text}");
    assert!(text.contains(&format!("/shop.db index {by_brand}")), "{text}");
    guest.check_console()?;
    guest.shutdown()
}
