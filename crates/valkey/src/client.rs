//! The connections to a cluster, and the scripts that run there.

use std::fmt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use fathom_failure::Failure;
use fathom_failure::text::foreign;
use parking_lot::Mutex;
use redis::aio::ConnectionLike;
use redis::cluster::ClusterClient;
use redis::cluster_async::ClusterConnection;
use redis::cluster_routing::{MultipleNodeRoutingInfo, RoutingInfo, SingleNodeRoutingInfo};
use redis::{
    ConnectionAddr, ConnectionInfo, IntoConnectionInfo, Pipeline, RedisConnectionInfo, Value,
};

use crate::connection::{BoundedConnection, Way};

/// The connections to each node. A `WAIT` holds up what follows on its connection.
const LANES: usize = 4;
/// The time limit of a connection.
pub(crate) const CONNECT_TIME_MAX: Duration = Duration::from_secs(3);
/// How long a node waits for its copies.
const WAIT_TIME_MAX: Duration = Duration::from_secs(2);
/// The time limit of an answer.
pub(crate) const ANSWER_TIME_MAX: Duration = Duration::from_secs(4);
/// The shortest time between two sets of connections.
const RENEWAL_INTERVAL: Duration = Duration::from_secs(1);
/// How often the client follows a redirection, or repeats a command on a new connection, by itself.
const RETRIES: u32 = 3;

/// The PEM files of TLS.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClusterTls {
    /// The authority that has signed the nodes' certificates.
    pub authority: PathBuf,
    /// This side's certificate and its private key, if the nodes require one.
    pub own: Option<(PathBuf, PathBuf)>,
}

/// How a cluster is reached, and what it has to promise.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClusterOptions {
    /// The addresses of some nodes, `host:port`.
    pub nodes: Vec<String>,
    /// The user of the nodes' access control lists; the default user if there is none.
    pub user: Option<String>,
    /// The file with the user's password, in its first line.
    pub password: Option<PathBuf>,
    /// The files of TLS; `None` for plain text.
    pub tls: Option<ClusterTls>,
    /// How many replicas have a write before it completes.
    pub copies: u32,
    /// How long a request is tried.
    pub timeout: Duration,
}

impl Default for ClusterOptions {
    /// No nodes, one copy, 30 s.
    fn default() -> Self {
        Self {
            nodes: Vec::new(),
            user: None,
            password: None,
            tls: None,
            copies: 1,
            timeout: Duration::from_secs(30),
        }
    }
}

/// Why a script has no result.
#[derive(Debug)]
pub(crate) enum CallError {
    /// It may have one later: a node is gone, or has not enough copies.
    Later(String),
    /// The node has no memory for the write.
    Full(String),
    /// It will not have one.
    Never(String),
}

/// The connections to a cluster.
pub(crate) struct Client {
    options: ClusterOptions,
    /// Makes connections with the passwords and certificates that were last read.
    cluster: Mutex<ClusterClient>,
    lanes: Mutex<Vec<ClusterConnection<BoundedConnection>>>,
    /// When the connections were made, while nobody makes new ones.
    made: tokio::sync::Mutex<Instant>,
    copies: u32,
}

/// What a node says of itself, by its address.
pub(crate) type NodeInfo = (String, String);

impl Client {
    /// Connects to the cluster.
    ///
    /// # Errors
    /// If no node answers, or a file of the options cannot be used.
    pub(crate) async fn connect(options: &ClusterOptions) -> Result<Self, Failure> {
        let client = client(options)?;
        let lanes = lanes(&client).await.map_err(|error| {
            Failure::new(format!("no node answers ({})", foreign(&error.to_string())))
                .advise("check `nodes`, the user, and that the cluster runs")
        })?;
        let (lanes, made) = (Mutex::new(lanes), tokio::sync::Mutex::new(Instant::now()));
        let (options, cluster) = (options.clone(), Mutex::new(client));
        Ok(Self { copies: options.copies, options, cluster, lanes, made })
    }

    /// Makes new connections, which ask the nodes again who has what: a node that hangs has been
    /// replaced, but the client learns that only from nodes that answer. The password and the
    /// certificates are read again; if they cannot be read now, the known ones are used.
    pub(crate) async fn renew(&self) {
        // Who comes meanwhile has the new connections afterwards.
        let Ok(mut made) = self.made.try_lock() else { return };
        if made.elapsed() < RENEWAL_INTERVAL {
            return;
        }
        let renewed = client(&self.options).ok();
        let cluster = {
            let mut known = self.cluster.lock();
            if let Some(renewed) = renewed {
                *known = renewed;
            }
            known.clone()
        };
        let limit = 2 * CONNECT_TIME_MAX;
        if let Ok(Ok(new)) = tokio::time::timeout(limit, lanes(&cluster)).await {
            *self.lanes.lock() = new;
        }
        *made = Instant::now();
    }

    fn lane(&self, lane: u64) -> ClusterConnection<BoundedConnection> {
        let lanes = self.lanes.lock();
        lanes[(lane % LANES as u64) as usize].clone()
    }

    /// Runs a script that reads. `lane` selects a connection.
    pub(crate) async fn read(&self, lane: u64, script: &Call<'_>) -> Result<Value, CallError> {
        let mut pipeline = Pipeline::with_capacity(1);
        script.add(&mut pipeline, "EVAL_RO");
        let values = self.send(lane, &pipeline, 1).await?;
        first(values)
    }

    /// Runs a script that writes, and waits until enough replicas have the write. Each node has
    /// made it durable itself if its `appendfsync` is `always`.
    pub(crate) async fn write(&self, lane: u64, script: &Call<'_>) -> Result<Value, CallError> {
        let mut pipeline = Pipeline::with_capacity(2);
        script.add(&mut pipeline, "EVAL");
        if self.copies == 0 {
            return first(self.send(lane, &pipeline, 1).await?);
        }
        // On the same connection, and right behind the write: a `WAIT` on another connection would
        // wait for nothing.
        pipeline.cmd("WAIT").arg(self.copies).arg(WAIT_TIME_MAX.as_millis() as u64);
        let mut values = self.send(lane, &pipeline, 2).await?;
        let waited = values.pop();
        let value = first(values)?;
        match waited {
            Some(Value::Int(copies)) if copies >= i64::from(self.copies) => Ok(value),
            Some(Value::Int(copies)) => Err(CallError::Later(format!(
                "only {copies} of {} replicas have a write",
                self.copies
            ))),
            Some(Value::ServerError(error)) => Err(of_error(&error.into())),
            other => Err(CallError::Never(format!("WAIT has the answer {}", shown(&other)))),
        }
    }

    async fn send(
        &self,
        lane: u64,
        pipeline: &Pipeline,
        count: usize,
    ) -> Result<Vec<Value>, CallError> {
        let mut connection = self.lane(lane);
        let answer = connection.req_packed_commands(pipeline, 0, count);
        // The client's own limits do not cover all of its retries.
        match tokio::time::timeout(2 * ANSWER_TIME_MAX, answer).await {
            Ok(answer) => answer.map_err(|error| of_error(&error)),
            Err(_) => Err(CallError::Later("a node does not answer".into())),
        }
    }

    /// The answers of all primaries to `INFO`.
    pub(crate) async fn nodes(&self) -> Result<Vec<NodeInfo>, Failure> {
        let answer = self.ask_all(redis::cmd("INFO")).await?;
        Ok(answer.into_iter().filter_map(|(node, value)| Some((node, text(&value)?))).collect())
    }

    /// The nodes' policies of making writes durable. `None` if the user may not know them.
    pub(crate) async fn policies(&self) -> Option<Vec<(String, String)>> {
        let mut command = redis::cmd("CONFIG");
        command.arg("GET").arg("appendfsync");
        let answer = self.ask_all(command).await.ok()?;
        let policy = |(node, value)| match value {
            Value::Array(pair) => Some((node, text(pair.get(1)?)?)),
            Value::Map(pairs) => Some((node, text(&pairs.first()?.1)?)),
            _ => None,
        };
        answer.into_iter().map(policy).collect()
    }

    /// Removes all keys that a pattern matches, on all primaries. Returns their number.
    pub(crate) async fn remove(&self, pattern: &str) -> Result<u64, Failure> {
        let mut removed = 0;
        for (node, _) in self.nodes().await? {
            let Some((host, Ok(port))) =
                node.rsplit_once(':').map(|(host, port)| (host, port.parse()))
            else {
                return Err(Failure::new(format!("{node:?} is not the address of a node")));
            };
            let mut cursor = "0".to_owned();
            loop {
                let mut command = redis::cmd("SCAN");
                command.arg(&cursor).arg("MATCH").arg(pattern).arg("COUNT").arg(1000);
                let node = SingleNodeRoutingInfo::ByAddress { host: host.to_owned(), port };
                let found =
                    self.lane(0).route_command(command, RoutingInfo::SingleNode(node)).await;
                let Value::Array(found) = found.map_err(of_node)? else {
                    return Err(Failure::new("a node has no keys"));
                };
                if let Some(Value::Array(keys)) = found.get(1) {
                    let keys: Vec<String> = keys.iter().filter_map(text).collect();
                    if !keys.is_empty() {
                        removed += keys.len() as u64;
                        let mut command = redis::cmd("UNLINK");
                        command.arg(keys);
                        let gone = self.lane(0).req_packed_command(&command).await;
                        gone.map_err(of_node)?;
                    }
                }
                cursor = found.first().and_then(text).unwrap_or_else(|| "0".into());
                if cursor == "0" {
                    break;
                }
            }
        }
        Ok(removed)
    }

    async fn ask_all(&self, command: redis::Cmd) -> Result<Vec<(String, Value)>, Failure> {
        let routing = RoutingInfo::MultiNode((MultipleNodeRoutingInfo::AllMasters, None));
        let mut connection = self.lane(0);
        let answer = connection.route_command(command, routing);
        let answer = tokio::time::timeout(2 * ANSWER_TIME_MAX, answer).await;
        let answer = answer.map_err(|_| Failure::new("the nodes do not answer"))?;
        match answer.map_err(of_node)? {
            Value::Map(answers) => Ok(answers
                .into_iter()
                .filter_map(|(node, value)| Some((text(&node)?, value)))
                .collect()),
            other => Err(Failure::new(format!("the nodes have the answer {}", shown(&other)))),
        }
    }
}

async fn lanes(
    client: &ClusterClient,
) -> redis::RedisResult<Vec<ClusterConnection<BoundedConnection>>> {
    let mut lanes = Vec::with_capacity(LANES);
    for _ in 0..LANES {
        lanes.push(client.get_async_generic_connection().await?);
    }
    Ok(lanes)
}

/// A script with its keys and arguments.
pub(crate) struct Call<'a> {
    pub(crate) script: &'static str,
    pub(crate) keys: &'a [String],
    pub(crate) arguments: &'a [&'a [u8]],
}

impl Call<'_> {
    fn add(&self, pipeline: &mut Pipeline, command: &str) {
        let command = pipeline.cmd(command).arg(self.script).arg(self.keys.len());
        for key in self.keys {
            command.arg(key);
        }
        for argument in self.arguments {
            command.arg(*argument);
        }
    }
}

/// The only value, without an error.
fn first(values: Vec<Value>) -> Result<Value, CallError> {
    match values.into_iter().next() {
        Some(Value::ServerError(error)) => Err(of_error(&error.into())),
        Some(value) => Ok(value),
        None => Err(CallError::Never("a node has no answer".into())),
    }
}

fn of_error(error: &redis::RedisError) -> CallError {
    let text = foreign(&error.to_string());
    let code = error.code().unwrap_or_default();
    if code == "OOM" || text.contains("OOM command not allowed") {
        CallError::Full(text)
    } else if matches!(code, "NOPERM" | "WRONGTYPE" | "CROSSSLOT") {
        CallError::Never(text)
    } else {
        CallError::Later(text)
    }
}

/// The text of a value, if it is one.
pub(crate) fn text(value: &Value) -> Option<String> {
    match value {
        Value::BulkString(bytes) => String::from_utf8(bytes.clone()).ok(),
        Value::SimpleString(text) | Value::VerbatimString { text, .. } => Some(text.clone()),
        Value::Int(number) => Some(number.to_string()),
        _ => None,
    }
}

fn of_node(error: redis::RedisError) -> Failure {
    Failure::new(foreign(&error.to_string())).because(error)
}

/// An answer that has no meaning, for a message.
fn shown(answer: &impl fmt::Debug) -> String {
    foreign(&format!("{answer:?}"))
}

/// Reads a file of the options.
fn read(path: &PathBuf) -> Result<Vec<u8>, Failure> {
    std::fs::read(path).map_err(|error| {
        let failure = Failure::from(error).about(path.display());
        failure.advise("name a file that the daemon may read")
    })
}

fn client(options: &ClusterOptions) -> Result<ClusterClient, Failure> {
    let password = options.password.as_ref().map(|path| {
        let text = String::from_utf8(read(path)?).map_err(|_| {
            let failure = Failure::new(format!("{}: not UTF-8 text", path.display()));
            failure.advise("write the password in its first line")
        })?;
        Ok::<_, Failure>(text.lines().next().unwrap_or_default().trim().to_owned())
    });
    let password = password.transpose()?;
    let nodes = options.nodes.iter().map(|node| info(node));
    let mut builder = ClusterClient::builder(nodes.collect::<Result<Vec<_>, _>>()?)
        .retries(RETRIES)
        .min_retry_wait(10)
        .max_retry_wait(200)
        .connection_timeout(CONNECT_TIME_MAX)
        .response_timeout(ANSWER_TIME_MAX);
    if let Some(user) = &options.user {
        builder = builder.username(user);
    }
    if let Some(password) = password {
        builder = builder.password(password);
    }
    // `redis` knows nothing of TLS, which the stream has.
    Way::new(options.tls.as_ref())?.install();
    builder.build().map_err(|error| of_node(error).advise("correct the cluster's table"))
}

/// The address of a node.
fn info(node: &str) -> Result<ConnectionInfo, Failure> {
    let wrong = || {
        let message = format!("{node:?} is not the address of a node");
        Failure::new(message).advise("write it like \"10.0.0.1:6379\"")
    };
    let (host, port) = node.rsplit_once(':').ok_or_else(wrong)?;
    let port = port.parse().map_err(|_| wrong())?;
    let host = host.trim_start_matches('[').trim_end_matches(']').to_owned();
    let info = ConnectionAddr::Tcp(host, port).into_connection_info().map_err(|_| wrong())?;
    Ok(info.set_redis_settings(RedisConnectionInfo::default()))
}
