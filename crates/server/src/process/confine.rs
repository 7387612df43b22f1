//! `fathom confine`: becomes a program that may use only the files that it is named.
//!
//! The daemon starts `qemu-storage-daemon` by it. The code that reads an image's metadata, which a
//! guest or a stranger may have written, is QEMU's and large; if it is taken over, it has the image
//! and nothing else:
//!
//! - of the file system, only the named files, programs and libraries, and a folder of its own
//!   (Landlock, Linux 5.13);
//! - no sockets but the two that it was given, and no connections (seccomp);
//! - no new rights, a session of its own, no other descriptors, no environment.
//!
//! It gets `SIGTERM` when the thread that has started it ends. So it closes its image in good order
//! even if the daemon is killed.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use clap::Args;
use fathom_failure::Failure;
use landlock::{
    ABI, Access, AccessFs, BitFlags, CompatLevel, Compatible, Ruleset, RulesetAttr,
    RulesetCreatedAttr, path_beneath_rules,
};
use rustix::process::{Signal, getppid, set_parent_process_death_signal};
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter};

use crate::features::keep::close_others;

/// The version of Landlock whose rights are taken away. An older kernel takes fewer.
const LANDLOCK: ABI = ABI::V5;
/// Where programs and libraries are.
const PROGRAMS: [&str; 5] = ["/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache"];

/// Become a program that may use only some files: the daemon starts this by itself
#[derive(Args, Clone, Debug)]
pub struct Confine {
    /// The process that starts it
    #[arg(long)]
    parent: i32,
    /// A file that may be written
    #[arg(long)]
    write: Vec<PathBuf>,
    /// A file that may be read
    #[arg(long)]
    read: Vec<PathBuf>,
    /// A folder in which files may be made and removed
    #[arg(long)]
    folder: Vec<PathBuf>,
    /// The program
    program: PathBuf,
    /// Its arguments
    #[arg(last = true)]
    arguments: Vec<OsString>,
}

/// Becomes the program. Returns only if that fails.
pub fn confine(options: &Confine) -> ExitCode {
    let Err(failure) = become_program(options);
    eprintln!("{failure:#}");
    ExitCode::FAILURE
}

fn become_program(options: &Confine) -> Result<std::convert::Infallible, Failure> {
    close_others();
    let _ = rustix::process::setsid();
    set_parent_process_death_signal(Some(Signal::TERM)).map_err(io::Error::from)?;
    // It may have ended before.
    if getppid().map(|it| it.as_raw_nonzero().get()) != Some(options.parent) {
        return Err(Failure::new("the daemon has ended"));
    }
    confine_files(options).map_err(|error| Failure::new(error.to_string()))?;
    confine_calls().map_err(|error| Failure::new(error.to_string()))?;
    let error = Command::new(&options.program).args(&options.arguments).env_clear().exec();
    Err(Failure::from(error).about(options.program.display()))
}

/// Takes away all files but those of the options. A kernel without Landlock takes none away.
fn confine_files(options: &Confine) -> Result<(), landlock::RulesetError> {
    let all = AccessFs::from_all(LANDLOCK);
    let program: BitFlags<AccessFs> = AccessFs::Execute | AccessFs::ReadFile | AccessFs::ReadDir;
    let read: BitFlags<AccessFs> = AccessFs::ReadFile.into();
    let write = AccessFs::ReadFile | AccessFs::WriteFile | AccessFs::Truncate | AccessFs::IoctlDev;
    let folder = write | AccessFs::MakeReg | AccessFs::RemoveFile;
    // A program that is elsewhere has its libraries beside it.
    let place = options.program.canonicalize().ok();
    let place = place.as_deref().and_then(Path::parent).and_then(Path::parent);
    let programs = PROGRAMS.iter().map(Path::new).chain(place.filter(|it| it.parent().is_some()));
    let created = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(all)?
        .create()?;
    created
        .add_rules(path_beneath_rules(programs, program))?
        .add_rules(path_beneath_rules(&options.read, read))?
        .add_rules(path_beneath_rules(&options.write, write))?
        .add_rules(path_beneath_rules(&options.folder, folder))?
        .restrict_self()?;
    Ok(())
}

/// Takes away the calls by which the program could reach others: new sockets, connections, rings
/// that could do both, and the memory and namespaces of others.
fn confine_calls() -> Result<(), seccompiler::Error> {
    let calls = [
        libc::SYS_socket,
        libc::SYS_connect,
        libc::SYS_bind,
        libc::SYS_io_uring_setup,
        libc::SYS_ptrace,
        libc::SYS_process_vm_readv,
        libc::SYS_process_vm_writev,
        libc::SYS_bpf,
        libc::SYS_mount,
        libc::SYS_unshare,
        libc::SYS_setns,
        libc::SYS_kill,
        libc::SYS_tkill,
    ];
    let rules = calls.into_iter().map(|call| (call, Vec::new())).collect::<BTreeMap<_, _>>();
    let refused = SeccompAction::Errno(libc::EACCES as u32);
    let architecture = std::env::consts::ARCH.try_into()?;
    let filter = SeccompFilter::new(rules, SeccompAction::Allow, refused, architecture)?;
    let program: BpfProgram = filter.try_into()?;
    seccompiler::apply_filter(&program)
}
