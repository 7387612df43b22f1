//! Copies and encryption of guests' files, which the layer `patterns` recognises.

mod calls;
pub(crate) mod feature;
mod pin;

use fathom_block::Clock;
use fathom_control::{
    Bytes, CopiedFile, DiskPatterns, EncryptedFile, EncryptionState, ErrorBody, ErrorCode,
    PatternFile, PatternProcess, PatternsReport,
};
use fathom_insight::{Name, Names};
use fathom_layers::Patterns;
use fathom_layers::patterns::{
    Actor, CopyRecord, EncryptedRecord, EncryptionInProgress, PatternsSnapshot, Subject,
};

use crate::daemon::stack::refusal;
use crate::daemon::status::unix_time_ns;
use crate::daemon::{Daemon, Served};
use pin::Pin;

/// The layer `patterns` of a disk.
pub(crate) fn of(served: &Served) -> Option<Patterns> {
    served.disk.layers().iter().find_map(|layer| Patterns::of(&**layer).cloned())
}

impl Daemon {
    /// The patterns of all disks with the layer, or of one disk.
    ///
    /// # Errors
    /// When there is no such disk, or it has no such layer.
    pub(crate) fn patterns(&self, disk: Option<&str>) -> Result<PatternsReport, ErrorBody> {
        let served = self.selected(disk)?;
        let time_ns = Clock::System.now_ns();
        let disks: Vec<DiskPatterns> =
            served.iter().filter_map(|served| of_disk(served, time_ns)).collect();
        if let (Some(name), true) = (disk, disks.is_empty()) {
            return Err(refusal(
                ErrorCode::NotFound,
                format!("the disk {name:?} has no layer `patterns`"),
                format!("add it with `fathom disk layer {name} patterns`"),
            ));
        }
        Ok(PatternsReport { time_ns, unix_time_ns: unix_time_ns(), disks })
    }
}

fn of_disk(served: &Served, now_ns: u64) -> Option<DiskPatterns> {
    let layer = of(served)?;
    let names = layer.names();
    let PatternsSnapshot { counts, copies, encrypted, in_progress } = layer.snapshot(now_ns);
    Some(DiskPatterns {
        disk: served.disk.name().to_owned(),
        vm: served.live().definition.vm.clone(),
        examined_bytes: counts.examined_bytes,
        transformed_bytes: counts.transformed_bytes,
        copies_count: counts.copies,
        copied_bytes: counts.copied_bytes,
        encrypted_count: counts.encrypted_files,
        random_count: counts.random_files,
        memory_bytes: counts.memory_bytes,
        in_progress: in_progress.iter().map(|state| state_of(state, names)).collect(),
        encrypted: encrypted.iter().map(|record| encrypted_of(record, names)).collect(),
        copies: copies.iter().map(|record| copy_of(record, names)).collect(),
    })
}

fn text(names: &Names, name: Name) -> String {
    names.text(name).as_deref().unwrap_or_default().to_owned()
}

fn file_of(file: &Subject, names: &Names) -> PatternFile {
    PatternFile {
        path: text(names, file.path),
        file_system: text(names, file.file_system),
        device: text(names, file.device),
        inode: file.inode,
        size: file.size,
    }
}

fn process_of(actor: &Actor, names: &Names) -> PatternProcess {
    PatternProcess {
        process_id: actor.process_id.into(),
        command: text(names, actor.process),
        start_ns: u64::from(actor.process_start) * 10_000_000,
        cgroup: text(names, actor.cgroup),
    }
}

fn state_of(state: &EncryptionInProgress, names: &Names) -> EncryptionState {
    EncryptionState {
        process: process_of(&state.actor, names),
        begun_ns: state.begun_ns,
        last_ns: state.last_ns,
        files: state.files,
        bytes: state.bytes,
        paths: state.paths.iter().map(|path| text(names, *path)).collect(),
    }
}

fn encrypted_of(record: &EncryptedRecord, names: &Names) -> EncryptedFile {
    EncryptedFile {
        time_ns: record.time_ns,
        file: file_of(&record.file, names),
        evidence: record.evidence.map_or("", |evidence| evidence.name()).to_owned(),
        source_path: text(names, record.source_path),
        by: process_of(&record.actor, names),
    }
}

fn copy_of(record: &CopyRecord, names: &Names) -> CopiedFile {
    CopiedFile {
        begun_ns: record.begun_ns,
        last_ns: record.last_ns,
        target: file_of(&record.target, names),
        source: file_of(&record.source, names),
        bytes: record.bytes,
        evidence: record.evidence.map_or("", |evidence| evidence.name()).to_owned(),
        by: process_of(&record.actor, names),
    }
}

/// Who encrypts, for people.
fn who(actor: &Actor, names: &Names) -> String {
    let process = match (actor.process_id, names.text(actor.process)) {
        (0, None) => "an unknown process".to_owned(),
        (0, Some(command)) => format!("{command:?} (several processes)"),
        (id, Some(command)) => format!("{command:?} (process {id})"),
        (id, None) => format!("process {id}"),
    };
    match names.text(actor.cgroup) {
        Some(cgroup) => format!("{process} in {cgroup}"),
        None => process,
    }
}

/// What distinguishes the states of a disk.
fn cause(actor: &Actor, names: &Names) -> String {
    let parts = [actor.process, actor.cgroup].map(|name| text(names, name));
    parts.join(" ").trim().to_owned()
}

/// The problem and the remedy. `pin` is the snapshot from before the encryption, if there is one.
fn problem(
    state: &EncryptionInProgress,
    names: &Names,
    disk: &str,
    pin: Option<&Pin>,
) -> (String, String) {
    let paths = state.paths.iter().filter_map(|path| Some(format!("{:?}", names.text(*path)?)));
    let paths: Vec<String> = paths.collect();
    let among = match &*paths {
        [] => String::new(),
        paths => format!(", among them {}", paths.join(", ")),
    };
    let held = pin.map(|pin| format!("; {}", pin.message())).unwrap_or_default();
    let message = format!(
        "{} encrypts files of the guest: {} so far, {}{among}{held}",
        who(&state.actor, names),
        fathom_control::count(state.files, "file"),
        Bytes(state.bytes),
    );
    let restore = pin.map_or_else(|| "restore the files from a backup".to_owned(), Pin::remedy);
    let remedy = format!(
        "`fathom patterns {disk}` lists them. If nobody means to do that, pause the guest \
         (`virsh suspend`), and {restore}"
    );
    (message, remedy)
}
