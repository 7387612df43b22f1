//! Copies and encryption of files by real programs, recognised by the layer `patterns`.

use std::collections::BTreeMap;

use fathom_control::{CopiedFile, DiskPatterns, EncryptedFile, ProblemKind};
use fathom_tests::{Assets, Disk, Error, Result, patience, until};

use crate::scene::{Scene, kernel};
use crate::writers::plugin;

/// The file systems in which files are encrypted and copied.
const PLACES: [(&str, &str); 3] = [
    ("ext4", "mkfs.ext4 -q -F /dev/vdb; mount /dev/vdb /mnt"),
    ("xfs", "mkfs.xfs -q -f /dev/vdb; mount /dev/vdb /mnt"),
    ("btrfs", "mkfs.btrfs -q -f /dev/vdb; mount /dev/vdb /mnt"),
];

/// Files with text, of sizes from 260 KiB to 1.5 MiB.
const SOURCES: &str = "
    export PATH=$PATH:/tools GNUPGHOME=/run/gpg
    mkdir -p /mnt/a /mnt/b /mnt/c /mnt/d /mnt/copies $GNUPGHOME; chmod 700 $GNUPGHOME
    for folder in a b c d; do for i in $(seq 8); do
        seq $((i * 7000)) $((i * 7000 + 37000 + i * 20000)) > /mnt/$folder/report-$i.txt
    done; done
    sync; echo 3 > /proc/sys/vm/drop_caches";

/// Programs that encrypt, each with the folder of its files.
const ENCRYPT: [(&str, &str); 4] = [
    // The content is replaced in place, without a header, as many programs that take hostages do.
    (
        "in place",
        "for f in /mnt/a/*; do
            openssl enc -aes-256-ctr -nosalt -K $key -iv 000102030405060708090a0b0c0d0e0f -in $f -out /run/out
            dd if=/run/out of=$f bs=64k conv=notrunc 2> /dev/null; mv $f $f.locked
        done",
    ),
    (
        "openssl",
        "for f in /mnt/b/*; do openssl enc -aes-256-cbc -pbkdf2 -iter 1 -pass pass:x -in $f -out $f.enc; rm $f; done",
    ),
    (
        "gpg",
        "for f in /mnt/c/*; do
            gpg --agent-program /tools/gpg-agent --batch --quiet --pinentry-mode loopback --passphrase x \
                --compress-algo none --s2k-count 1024 -c $f
            rm $f
        done",
    ),
    // New files with other names and without a header.
    (
        "renamed",
        "i=0; for f in /mnt/d/*; do
            i=$((i + 1))
            openssl enc -aes-256-ctr -nosalt -K $key -iv $(printf %032x $i) -in $f -out /mnt/d/$(printf %08x $((i * 7919))).crypt
            rm $f
        done",
    ),
];

/// What looks like encryption and is none.
const INNOCENT: &str = "
    mkdir /mnt/innocent; cd /mnt/innocent
    for i in $(seq 4); do seq $((i * 9000)) $((i * 9000 + 200000)) > text-$i; done
    cp /tools/lib/* . 2> /dev/null
    for f in text-1 text-2 openssl gpg; do
        [ -e $f ] || continue
        xz -0 -k $f; zstd -q $f; gzip -k $f
    done
    tar -c text-* | xz -0 > all.tar.xz; tar -cz text-* > all.tgz
    cat all.tgz all.tar.xz > all.tgz.new; mv all.tgz.new all.tgz
    head -c 3000000 /dev/urandom > random.bin; cp random.bin other.bin
    cryptsetup -q luksFormat --pbkdf pbkdf2 --pbkdf-force-iterations 1000 random.bin /tools/openssl 2> /dev/null || true
    for i in $(seq 3); do sqlite3 data.db \"CREATE TABLE t$i (a); INSERT INTO t$i VALUES (randomblob(300000));\"; done
    sqlite3 data.db .dump | gzip > dump.sql.gz; cd /; sync";

/// Programs that copy the file `/mnt/copies/source`, each with the file that it makes.
const COPY: [(&str, &str); 6] = [
    ("cp", "cp --reflink=never /mnt/copies/source /mnt/copies/cp"),
    ("dd", "dd if=/mnt/copies/source of=/mnt/copies/dd bs=64k 2> /dev/null"),
    ("rsync", "rsync /mnt/copies/source /mnt/copies/rsync"),
    // Without the pipe it would refer to the same blocks on file systems that can.
    ("cat", "cat /mnt/copies/source | cat > /mnt/copies/cat"),
    (
        "extracted",
        "tar -C /mnt/copies -cf /mnt/copies/all.tar source; mkdir /mnt/copies/x; sync; echo 3 > /proc/sys/vm/drop_caches; \
        tar -C /mnt/copies/x -xf /mnt/copies/all.tar; mv /mnt/copies/x/source /mnt/copies/extracted",
    ),
    (
        "direct",
        "dd if=/mnt/copies/source of=/mnt/copies/direct bs=64k iflag=direct oflag=direct 2> /dev/null",
    ),
];

/// The size of the file that is copied, in bytes; the last page is not full.
const COPIED: u64 = 8_003_000;

/// A kept query about encryption in progress.
const QUERY: &str = "
[[query]]
name = 'encryption'
cql = \"select VDisk, Process, Files from Patterns where Pattern = 'encryption-in-progress'\"
action = { log = 'warning' }
";

impl Scene {
    fn patterns(&self) -> Result<DiskPatterns> {
        let report = self
            .daemon
            .client()
            .patterns(Some("disk"))
            .map_err(|error| Error::new(error.to_string()))?;
        report.disks.into_iter().next().ok_or_else(|| Error::new("there are no patterns"))
    }

    /// Whether encryption in progress is a problem of the disk.
    fn is_problem(&self) -> Result<bool> {
        let status = self.daemon.client().disk("disk");
        let problems = status.map_err(|error| Error::new(error.to_string()))?.problems;
        Ok(problems.iter().any(|problem| problem.kind == ProblemKind::EncryptionInProgress))
    }

    /// Programs that encrypt, and others. Each file system has a new layer, with empty tables.
    fn encryption(&mut self, place: &str) -> Result<()> {
        self.prepare(SOURCES)?;
        for (number, (name, script)) in ENCRYPT.iter().enumerate() {
            self.prepare(&format!(
                "export PATH=$PATH:/tools GNUPGHOME=/run/gpg
                key=$(echo {place} | sha256sum | head -c 64)
{script}"
            ))?;
            let folder = format!("/{}/", char::from(b'a' + number as u8));
            let found = self.patterns()?;
            let of = |file: &&EncryptedFile| {
                file.file.file_system == place && file.file.path.starts_with(&folder)
            };
            let mut evidence: BTreeMap<&str, u32> = BTreeMap::new();
            for file in found.encrypted.iter().filter(of) {
                *evidence.entry(&file.evidence).or_default() += 1;
            }
            let right: u32 =
                evidence.iter().filter(|(sign, _)| !sign.is_empty()).map(|(_, count)| count).sum();
            println!("{place}, {name}: {right} of 8 {evidence:?}");
            if right != 8 {
                self.note(place, Err(Error::new(format!("{name}: {right} of 8 files"))));
            }
            let is_named = found.in_progress.iter().any(|state| {
                let command = &state.process.command;
                state.files >= 8
                    && ["dd", "openssl", "gpg", "ld-linux-x86-64"]
                        .iter()
                        .any(|it| command.starts_with(it))
            });
            if !is_named {
                let states = &found.in_progress;
                self.note(place, Err(Error::new(format!("{name}: {states:?}"))));
            }
        }
        until("the problem", patience(10), || Ok(self.is_problem()?.then_some(())))?;
        until("the action of the query", patience(10), || {
            Ok(self.daemon.log().contains("query encryption: VDisk").then_some(()))
        })?;
        let before = self.patterns()?.encrypted_count;
        self.prepare(&format!("export PATH=$PATH:/tools\n{INNOCENT}"))?;
        let found = self.patterns()?;
        let wrong = found.encrypted.iter().filter(|file| file.file.path.starts_with("/innocent"));
        let (random, wrong): (Vec<_>, Vec<_>) = wrong.partition(|file| file.evidence.is_empty());
        let names = |files: &[&EncryptedFile]| -> Vec<String> {
            files.iter().map(|file| format!("{} ({})", file.file.path, file.evidence)).collect()
        };
        println!("{place}: random {:?}, wrong {:?}", names(&random), names(&wrong));
        if !wrong.is_empty() || found.encrypted_count != before {
            self.note(place, Err(Error::new(format!("wrong: {:?}", names(&wrong)))));
        }
        Ok(())
    }

    /// File systems whose bytes on the disk are not those of the files: nothing is said of them.
    fn transformed(&mut self) -> Result<()> {
        const WAYS: [(&str, &str, &str, &str); 2] = [
            (
                "LUKS",
                "dm_crypt",
                "printf x | cryptsetup -q luksFormat --pbkdf pbkdf2 --pbkdf-force-iterations 1000 /dev/vdb -
                printf x | cryptsetup -q open /dev/vdb secret --key-file -
                mkfs.ext4 -q -F /dev/mapper/secret; mount /dev/mapper/secret /mnt",
                "umount /mnt; cryptsetup close secret",
            ),
            (
                "compressed Btrfs",
                "btrfs",
                "mkfs.btrfs -q -f /dev/vdb; mount -o compress-force=zstd /dev/vdb /mnt",
                "umount /mnt",
            ),
        ];
        for (name, module, make, end) in WAYS {
            if !self.has(name, module, "cryptsetup")? {
                continue;
            }
            let before = self.patterns()?;
            self.prepare(&format!(
                "{make}
                for i in $(seq 6); do seq $((i * 7000)) $((i * 7000 + 90000)) > /mnt/report-$i.txt; done
                sync; echo 3 > /proc/sys/vm/drop_caches; cat /mnt/report-* > /dev/null
                cp --reflink=never /mnt/report-1.txt /mnt/again.txt; sync; {end}"
            ))?;
            let after = self.patterns()?;
            let bytes = after.transformed_bytes - before.transformed_bytes;
            println!("{name}: {bytes} bytes were not examined");
            let found = |of: &DiskPatterns| (of.encrypted_count, of.random_count, of.copies_count);
            if found(&before) != found(&after) || bytes < 100_000 {
                let files: Vec<_> = after.encrypted.iter().map(|file| &file.file.path).collect();
                self.note(name, Err(Error::new(format!("{bytes} bytes, {files:?}"))));
            }
        }
        Ok(())
    }

    /// Programs that copy.
    fn copies(&mut self, place: &str) -> Result<()> {
        self.prepare(&format!(
            "i=0; while [ $i -lt 64 ]; do i=$((i + 1)); seq $((i * 1000003)) $((i * 1000003 + 20000)); done \
                | head -c {COPIED} > /mnt/copies/source
            sync; echo 3 > /proc/sys/vm/drop_caches"
        ))?;
        for (_, script) in COPY {
            self.prepare(&format!("export PATH=$PATH:/tools\n{script}\nsync"))?;
        }
        let found = self.patterns()?;
        for (name, _) in COPY {
            // rsync writes a file with another name, and moves it.
            let is_target = |copy: &&CopiedFile| {
                let path = copy.target.path.trim_start_matches("/copies/");
                let is_own = path == name
                    || name == "rsync" && path.starts_with(".source.")
                    || name == "extracted" && path == "x/source";
                is_own && copy.target.file_system == place
            };
            let own: Vec<_> = found.copies.iter().filter(is_target).collect();
            let bytes: u64 = own.iter().map(|copy| copy.bytes).sum();
            let sources: Vec<&str> = own.iter().map(|copy| &*copy.source.path).collect();
            let by: Vec<&str> = own.iter().map(|copy| &*copy.by.command).collect();
            println!("{place}, {name}: {bytes} of {COPIED} bytes of {sources:?} by {by:?}");
            let is_from =
                sources.iter().all(|path| ["/copies/source", "/copies/all.tar"].contains(path));
            if !(COPIED * 99 / 100..=COPIED + 8192).contains(&bytes) || !is_from {
                self.note(place, Err(Error::new(format!("{name}: {bytes} bytes of {sources:?}"))));
            }
        }
        Ok(())
    }
}

/// Real programs encrypt and copy files on three file systems. All encrypted files are found, who
/// encrypts is named, and nothing else is taken for encryption.
fn patterns_of(kernel: &str) -> Result<()> {
    let tools = Disk::snapshot_of(Assets::get()?.tools()?);
    let layers = ", { kind = 'patterns', memory = '32MiB', alarm_files = 8, alarm_time = '30s' }";
    let started =
        Scene::start_intercepted_above(kernel, 512, &plugin()?, layers, 1, QUERY, vec![tools])?;
    let Some(mut scene) = started else {
        println!("Skipped: there is no kernel {kernel}");
        return Ok(());
    };
    scene.prepare("mkdir /tools; mount -o ro /dev/vdc /tools")?;
    for (name, make) in PLACES {
        if !scene.has(name, name, "")? {
            continue;
        }
        scene.prepare(&format!("modprobe -q {name} || true; {make}"))?;
        let (encryption, copies) = (scene.encryption(name), scene.copies(name));
        scene.note(name, encryption);
        scene.note(name, copies);
        scene.prepare("umount /mnt")?;
    }
    let transformed = scene.transformed();
    scene.note("transformed", transformed);
    until("the end of the problem", patience(60), || Ok((!scene.is_problem()?).then_some(())))?;
    scene.end()
}

#[test]
fn patterns_of_real_programs() -> Result<()> {
    patterns_of(&kernel())
}

#[test]
fn patterns_of_real_programs_on_the_newest_kernel() -> Result<()> {
    patterns_of(&crate::introspection::newest())
}
