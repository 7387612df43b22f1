//! A connection to a node. The crate `redis` speaks the protocol over a stream that is made here,
//! so that no node can send more than an answer has.

use std::cell::RefCell;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use fathom_failure::Failure;
use fathom_tls::Tls;
use redis::aio::{ConnectionLike, MultiplexedConnection};
use redis::cluster_async::Connect;
use redis::{
    AsyncConnectionConfig, Cmd, ConnectionAddr, ErrorKind, IntoConnectionInfo, Pipeline,
    RedisError, RedisFuture, Value,
};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

use crate::answer::AnswerBounds;
use crate::client::{ANSWER_TIME_MAX, CONNECT_TIME_MAX, ClusterTls};

/// The most connections of a client: a node may name any number of others.
const CONNECTIONS_MAX: usize = 2048;

/// How the connections of a client are made.
#[derive(Clone, Default)]
pub(crate) struct Way {
    tls: Option<Tls>,
    /// Each connection has a part in it.
    connections: Arc<()>,
}

thread_local! {
    /// The way of the client whose runtime this thread runs: `redis` makes a connection by its
    /// type, and passes nothing on.
    static WAY: RefCell<Way> = RefCell::default();
}

impl Way {
    /// Reads the files of TLS.
    ///
    /// # Errors
    /// If one of them cannot be used.
    pub(crate) fn new(tls: Option<&ClusterTls>) -> Result<Self, Failure> {
        let tls = tls.map(client).transpose()?;
        Ok(Self { tls, ..Self::default() })
    }

    /// Uses it for the connections that this thread makes from now on.
    pub(crate) fn install(self) {
        WAY.with_borrow_mut(|way| {
            // Connections that were made before count, too.
            let connections = Arc::clone(&way.connections);
            *way = Self { connections, ..self };
        });
    }
}

/// Reads the files of TLS.
fn client(files: &ClusterTls) -> Result<Tls, Failure> {
    let own = files.own.as_ref().map(|(certificate, key)| (&**certificate, &**key));
    Tls::client(&files.authority, own).map_err(|error| {
        Failure::new(error.to_string()).advise("name a file that the daemon can use")
    })
}

/// A stream that ends when a node sends more than an answer has.
struct BoundedStream<S> {
    stream: S,
    bounds: AnswerBounds,
    _part: Arc<()>,
}

impl<S: AsyncRead + Unpin> AsyncRead for BoundedStream<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let known = buffer.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(context, buffer))?;
        let examined = self.bounds.examine(&buffer.filled()[known..]);
        Poll::Ready(examined.map_err(|defect| io::Error::new(io::ErrorKind::InvalidData, defect)))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for BoundedStream<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

/// A connection to a node.
#[derive(Clone)]
pub(crate) struct BoundedConnection(MultiplexedConnection);

impl Connect for BoundedConnection {
    fn connect_with_config<'a, T>(info: T, _config: AsyncConnectionConfig) -> RedisFuture<'a, Self>
    where
        T: IntoConnectionInfo + Send + 'a,
    {
        let way = WAY.with_borrow(Clone::clone);
        Box::pin(async move {
            let info = info.into_connection_info()?;
            let connect = connect(&info, way);
            let connected = tokio::time::timeout(CONNECT_TIME_MAX, connect).await;
            connected.unwrap_or_else(|_| Err(io::Error::from(io::ErrorKind::TimedOut).into()))
        })
    }
}

async fn connect(info: &redis::ConnectionInfo, way: Way) -> Result<BoundedConnection, RedisError> {
    let ConnectionAddr::Tcp(host, port) = info.addr() else {
        return Err((ErrorKind::InvalidClientConfig, "a node has a host and a port").into());
    };
    // One is the client's, and one is in `way`.
    if Arc::strong_count(&way.connections) > CONNECTIONS_MAX + 2 {
        return Err((ErrorKind::Client, "the nodes name too many others").into());
    }
    let stream = TcpStream::connect((&**host, *port)).await?;
    let Some(tls) = way.tls else {
        return start(info, stream, way.connections).await;
    };
    start(info, tls.secure(stream, host).await?, way.connections).await
}

/// Begins the protocol on a stream.
async fn start(
    info: &redis::ConnectionInfo,
    stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
    part: Arc<()>,
) -> Result<BoundedConnection, RedisError> {
    let stream = BoundedStream { stream, bounds: AnswerBounds::default(), _part: part };
    let config = AsyncConnectionConfig::new().set_response_timeout(Some(ANSWER_TIME_MAX));
    let (connection, driver) =
        MultiplexedConnection::new_with_config(info.redis_settings(), stream, config).await?;
    // It ends with the last use of the connection.
    tokio::spawn(driver);
    Ok(BoundedConnection(connection))
}

impl ConnectionLike for BoundedConnection {
    fn req_packed_command<'a>(&'a mut self, command: &'a Cmd) -> RedisFuture<'a, Value> {
        self.0.req_packed_command(command)
    }

    fn req_packed_commands<'a>(
        &'a mut self,
        commands: &'a Pipeline,
        offset: usize,
        count: usize,
    ) -> RedisFuture<'a, Vec<Value>> {
        self.0.req_packed_commands(commands, offset, count)
    }

    fn get_db(&self) -> i64 {
        self.0.get_db()
    }
}
