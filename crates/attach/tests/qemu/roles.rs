//! What this program is when another test starts it.

use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use fathom_attach::{
    AttachOptions, Control, EvictionOptions, Helpers, Pager, SwapOptions, SystemCall, Vmm, attach,
    clean, guard, inject,
};
use fathom_failure::Failure;

/// Names the step, of pager or injector, at which it ends itself, as `pager:2`.
pub const DIE_AT: &str = "FATHOM_TEST_DIE_AT";

/// Names the folder of the store of pages; none without eviction.
pub const STORE: &str = "FATHOM_TEST_STORE";
/// Names the folder of the swap file; none without one.
pub const SWAP: &str = "FATHOM_TEST_SWAP";
/// The limit in bytes; none for no limit.
pub const LIMIT: &str = "FATHOM_TEST_LIMIT";

/// The helpers: this program.
pub fn helpers() -> Helpers {
    Helpers {
        program: PathBuf::from("/proc/self/exe"),
        injector: vec!["role-injector".into()],
        guard: vec!["role-guard".into()],
        cleaner: vec!["role-cleaner".into()],
    }
}

/// Ends, or for `stop` stops, this process without any warning if it is the step's turn.
fn pass(who: &str, step: usize) {
    let wanted = std::env::var(DIE_AT).unwrap_or_default();
    let signal = match wanted {
        wanted if wanted == format!("{who}:{step}") => libc::SIGKILL,
        wanted if wanted == format!("stop-{who}:{step}") => libc::SIGSTOP,
        _ => return,
    };
    // SAFETY: a signal to this process.
    unsafe { libc::kill(libc::getpid(), signal) };
}

/// Plays a role, if the arguments name one.
pub fn play(arguments: &[String]) -> Option<ExitCode> {
    let number = |index: usize| arguments[index].parse::<i32>().unwrap();
    match arguments.first()?.as_str() {
        "role-injector" => {
            let word = |index: usize| arguments[index].parse::<u64>().unwrap();
            let call = SystemCall { number: word(2), arguments: [word(3), word(4), word(5)] };
            let report = inject(number(1), call, &mut |step| pass("injector", step as usize));
            println!("{}", serde_json::to_string(&report).unwrap());
        }
        "role-guard" => guard().unwrap(),
        "role-cleaner" => {
            clean(Path::new(&arguments[1]), arguments.get(2).map(Path::new));
        }
        // VMM, folder, socket or "-", whether it has to adopt.
        "role-pager" => {
            let vmm = Vmm::open(number(1)).unwrap();
            let options = AttachOptions {
                folder: PathBuf::from(&arguments[2]),
                qmp: (arguments[3] != "-").then(|| PathBuf::from(&arguments[3])),
                helpers: helpers(),
                must_adopt: arguments[4] == "adopt",
            };
            let attached = attach(vmm, &options, &mut |step| pass("pager", step as usize));
            match attached.and_then(|pager| with_limit(pager, &arguments[2])) {
                Ok(pager) => serve(pager),
                Err(failure) => {
                    println!("refused: {failure:#}");
                    return Some(ExitCode::from(1));
                }
            }
        }
        // Folder of the tables, what it does.
        "role-holder" => crate::holder::play(Path::new(&arguments[1]), &arguments[2]),
        "role-tracer" => {
            // SAFETY: no memory of this process is involved.
            let failed = unsafe { libc::ptrace(libc::PTRACE_SEIZE, number(1), 0, 0) };
            assert_eq!(failed, 0);
            println!("traced");
            std::thread::park();
        }
        _ => return None,
    }
    Some(ExitCode::SUCCESS)
}

/// Has a pager take pages away, if this test wants it.
fn with_limit(mut pager: Pager, folder: &str) -> Result<Pager, Failure> {
    let Ok(store) = std::env::var(STORE) else { return Ok(pager) };
    let leases = PathBuf::from(folder).with_extension("leases");
    let swap = std::env::var(SWAP).ok().map(|folder| SwapOptions {
        folder: folder.into(),
        bytes_max: None,
        memory_max: 1 << 20,
    });
    pager.allow_eviction(EvictionOptions {
        leases,
        store: store.into(),
        swap,
        ask: Arc::new(|| {}),
    })?;
    let limit = std::env::var(LIMIT).ok().map(|limit| limit.parse().unwrap());
    match pager.set_limit(limit) {
        Ok(()) => Ok(pager),
        Err(failure) => {
            pager.detach();
            Err(failure)
        }
    }
}

/// Serves until the standard input ends.
fn serve(mut pager: Pager) {
    let folder = PathBuf::from(std::env::args().nth(3).unwrap());
    let (status, limit) = (pager.status(), pager.limit());
    let process = pager.vmm().process();
    let _control = Control::start(&folder, process, status, limit).unwrap();
    println!("attached: {}", serde_json::to_string(&*pager.status().lock()).unwrap());
    pager.serve(std::io::stdin().as_fd()).unwrap();
    println!("detached: {}", serde_json::to_string(&pager.detach()).unwrap());
}
