//! Telling the service manager (systemd's `sd_notify` protocol).

use sd_notify::NotifyState;

/// Tells whoever listens on `NOTIFY_SOCKET` about the daemon's `state`. Does nothing where nobody
/// asked to be told.
pub(crate) fn notify(state: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(state) {
        tracing::warn!(%error, "the service manager cannot be told");
    }
}
