//! `fathom replay`: its results and its errors.
mod common;

use std::fs;

use common::run;

/// Two rounds over 64 KiB of a disk, a write, a discard, and a read of what was discarded; the
/// metadata and a journal have their classes. Responses are no requests.
const TRACE: &str = "\
BlktapTS,Type,IOOp,Sector,Size,VDisk,Kind,Class
0,Q,r,0,128,a,metadata,5
1000,R,r,0,128,a,metadata,5
2000,Q,r,0,128,a,metadata,5
3000,Q,w,128,32,a,journal,5
4000,Q,d,0,32,a,,
5000,Q,r,0,32,a,data,0
6000,Q,r,0,32,b,,
7000,Q,f,0,0,a,,
";

#[test]
fn hits_are_counted_by_class() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path();
    fs::write(path.join("x.csv"), TRACE).expect("it is written");
    let arguments = ["replay", "x.csv", "--cache", "1M,64M", "--policy", "none,auto", "--json"];
    let (status, stdout, stderr) = run(path, &arguments);
    assert_eq!(status, 0, "{stderr}");
    let report: serde_json::Value = serde_json::from_str(&stdout).expect("it is JSON");
    assert_eq!((&report["requests"], &report["disks"]), (&6.into(), &2.into()));
    let rows = report["rows"].as_array().expect("rows");
    assert_eq!(rows.len(), 4);
    for row in rows {
        // Blocks of 16 KiB: four are read twice, one is written, two are read once.
        assert_eq!((&row["accesses"], &row["reads"]), (&11.into(), &10.into()), "{row}");
        assert!((row["hit_ratio"].as_f64().expect("a number") - 4.0 / 11.0).abs() < 1e-9, "{row}");
        assert_eq!((&row["disk_reads"], &row["disk_writes"]), (&3.into(), &1.into()), "{row}");
        let classes = row["classes"].as_array().expect("classes");
        let hits = |name: &str| {
            let class = classes.iter().find(|class| class["class"] == name).expect("the class");
            class["hit_ratio"].as_f64().expect("a number")
        };
        assert!((hits("5") - 0.5).abs() < 1e-9, "{row}");
        assert!(hits("0") + hits("unknown") + hits("journal") < 1e-9, "{row}");
    }
    let (status, stdout, stderr) = run(path, &["replay", "x.csv", "--cache", "1M", "--curve"]);
    assert_eq!(status, 0, "{stderr}");
    assert!(stdout.contains("36.36%") && stdout.contains("by class"), "{stdout}");
    assert!(stdout.contains("LRU cache"), "{stdout}");
}

#[test]
fn the_requests_of_the_warm_up_are_not_counted() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path();
    let trace = "BlktapTS,Type,IOOp,Sector,Size,VDisk,Kind,Class,DbPart\n\
        5000,Q,w,0,32,a,direct,0,table\n6000,Q,w,64,32,a,direct,0,index\n\
        9000,Q,r,0,32,a,direct,0,table\n9500,Q,r,128,32,a,data,31,\n";
    fs::write(path.join("x.csv"), trace).expect("it is written");
    let all = ["replay", "x.csv", "--cache", "1M", "--json"];
    let report = |more: &[&str]| -> serde_json::Value {
        let (status, stdout, stderr) = run(path, &[&all[..], more].concat());
        assert_eq!(status, 0, "{stderr}");
        serde_json::from_str(&stdout).expect("it is JSON")
    };
    let classes = |report: &serde_json::Value| -> Vec<(String, u64)> {
        let classes = report["rows"][0]["classes"].as_array().expect("classes").iter();
        let one = |class: &serde_json::Value| {
            let name = class["class"].as_str().expect("a name").to_owned();
            (name, class["accesses"].as_u64().expect("a number"))
        };
        classes.map(one).collect()
    };
    // The host's classes end below those that have a name.
    let expected = [("25", 1), ("index", 1), ("table", 2)].map(|(name, n)| (name.to_owned(), n));
    assert_eq!(classes(&report(&[])), expected);
    // From 4000 ns after the first request on; the cache has what was written before.
    let warm = report(&["--warmup", "4us"]);
    let row = &warm["rows"][0];
    assert_eq!((&row["accesses"], &row["disk_reads"]), (&2.into(), &1.into()), "{row}");
    assert_eq!((&row["disk_writes"], &warm["requests"]), (&0.into(), &4.into()), "{warm}");
    let (status, _, stderr) = run(path, &[&all[..], &["--warmup", "5us"]].concat());
    assert_eq!(status, 2, "{stderr}");
    assert!(stderr.contains("ends before --warmup"), "{stderr}");
}

#[test]
fn invalid_options_and_inputs_are_errors() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path();
    fs::write(path.join("x.csv"), TRACE).expect("it is written");
    fs::write(path.join("none.csv"), "BlktapTS,Type,IOOp\n1,Q,f\n").expect("it is written");
    assert_eq!(run(path, &["replay", "x.csv"]).0, 2);
    assert_eq!(run(path, &["replay", "x.csv", "--cache", "1M", "--block", "5K"]).0, 2);
    assert_eq!(run(path, &["replay", "x.csv", "--cache", "1M", "--block", "128K"]).0, 2);
    assert_eq!(run(path, &["replay", "x.csv", "--cache", "1M", "--policy", "lru"]).0, 2);
    let (status, _, stderr) = run(path, &["replay", "x.csv", "--cache", "1K"]);
    assert!(status == 2 && stderr.contains("no block of 16 KiB"), "{stderr}");
    let (status, _, stderr) = run(path, &["replay", "none.csv", "--cache", "1M"]);
    assert!(status == 1 && stderr.contains("no requests"), "{stderr}");
    let (status, _, stderr) = run(path, &["replay", "y.csv", "--cache", "1M"]);
    assert!(status == 1 && stderr.contains("cannot read y.csv"), "{stderr}");
}
