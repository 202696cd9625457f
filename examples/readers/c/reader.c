// Reads rows of a kvemb table over hiredis. What every step means: docs/storage-format.md. How to build and run it: ../README.md.
#include <errno.h>
#include <hiredis/hiredis.h>
#include <math.h>
#include <openssl/evp.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
enum { USAGE = 2, LOST_NODE = 3, STALE_MAP = 4, WRONG_RECORD = 5, N_SLOTS = 16384, MOST_NODES = 512 };
static const char ALPHABET[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
static char said[600], slot_tags[N_SLOTS][3];
static jmp_buf failed;
static double deadline_s;
_Noreturn static void fail(int why, const char *format, ...) {  // to the loop in main
    va_list args;
    va_start(args, format);
    vsnprintf(said, sizeof said, format, args);
    longjmp(failed, why);
}
static double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}
static struct timeval left(double share) {  // of the time until the deadline
    double s = fmax((deadline_s - now_s()) * share, 0.001);
    return (struct timeval){(long)s, (long)((s - floor(s)) * 1e6)};
}
// --- msgpack: kind 'i' integer, 'f' float, 't' bool, '0' nil: n is the value's bits; 's' text, 'b' bytes, 'a' list, 'm' map: n is the length
typedef struct { char kind; uint64_t n; const uint8_t *begin, *body, *end; } Item;
static Item item(const uint8_t *at, const uint8_t *limit, int depth) {
    Item it = {0, 0, at, at + 1, at + 1};
    int c = at < limit && depth < 8 ? *at : 0xc1, width = 0;
    if (c < 0x80 || c >= 0xe0) it.kind = 'i', it.n = (uint64_t)(int8_t)c;
    else if (c < 0x90) it.kind = 'm', it.n = c & 15;
    else if (c < 0xa0) it.kind = 'a', it.n = c & 15;
    else if (c < 0xc0) it.kind = 's', it.n = c & 31;
    else it.kind = "0?ttbbb???ffiiiiiiii?????sssaamm"[c - 0xc0], width = "00001240004812481248000001242424"[c - 0xc0] - '0';
    if (c == 0xc3) it.n = 1;
    if (it.kind == '?' || at + 1 + width > limit) fail(WRONG_RECORD, "a value of the cluster is damaged, or of another release");
    for (int i = 0; i < width; i++) it.n = it.n << 8 | *it.body++;
    it.end = it.body;
    if ((it.kind == 's' || it.kind == 'b') && it.n <= (uint64_t)(limit - it.body)) it.end += it.n;
    else if (it.kind == 's' || it.kind == 'b') fail(WRONG_RECORD, "a value of the cluster is cut off");
    for (uint64_t i = 0; i < it.n * (it.kind == 'a' ? 1 : it.kind == 'm' ? 2 : 0); i++) it.end = item(it.end, limit, depth + 1).end;
    return it;
}
static Item at(Item list, uint64_t index) {
    if (list.kind != 'a' || index >= list.n) fail(WRONG_RECORD, "a value of the cluster is of another release");
    Item it = item(list.body, list.end, 1);
    while (index--) it = item(it.end, list.end, 1);
    return it;
}
static int is(Item text, const char *expected) {
    return text.kind == 's' && text.n == strlen(expected) && !memcmp(text.body, expected, text.n);
}
static Item get(Item map, const char *key) {  // kind 0: it is not there
    const uint8_t *p = map.body;
    for (uint64_t i = 0; map.kind == 'm' && i < map.n; i++) {
        Item name = item(p, map.end, 1), value = item(name.end, map.end, 1);
        if (is(name, key)) return value;
        p = value.end;
    }
    return (Item){0};
}
static Item decode(const redisReply *reply, const char *magic, uint64_t least, uint64_t most) {
    Item it = item((uint8_t *)reply->str, (uint8_t *)reply->str + reply->len, 0);
    if (!is(at(it, 0), magic) || at(it, 1).n < least || at(it, 1).n > most) fail(WRONG_RECORD, "%s: damaged, or of another release", magic);
    return it;
}
// --- digests, and bytes put together for them
typedef struct { size_t n; uint8_t data[1 << 18]; } Bytes;
static void add(Bytes *b, const void *data, size_t n) {
    if (n > sizeof b->data - b->n) fail(WRONG_RECORD, "a definition or a map is too long");
    memcpy(b->data + b->n, data, n), b->n += n;
}
static void add_byte(Bytes *b, int byte) { add(b, &(uint8_t){byte}, 1); }
static void add_item(Bytes *b, Item it) { add(b, it.begin, it.end - it.begin); }
static void add_text(Bytes *b, const char *text) { add_byte(b, 0xa0 | strlen(text)), add(b, text, strlen(text)); }
static void add_uint(Bytes *b, uint64_t value) {
    int width = value < 128 ? 0 : value < 1 << 8 ? 1 : value < 1 << 16 ? 2 : value < 1ull << 32 ? 4 : 8;
    add_byte(b, width ? (width == 1 ? 0xcc : width == 2 ? 0xcd : width == 4 ? 0xce : 0xcf) : (int)value);
    while (width--) add_byte(b, value >> 8 * width & 255);
}
static Bytes sum, packed;
static void part(char kind, const void *data, uint64_t n) {  // lengths are little-endian, as on the machines that this runs on
    add_byte(&sum, kind), add(&sum, &n, 8), add(&sum, data, n);
}
static uint64_t digest(void) {  // of the parts so far
    uint64_t out[8];
    EVP_Digest(sum.data, sum.n, (uint8_t *)out, NULL, EVP_blake2b512(), NULL);
    return sum.n = 0, out[0];
}
static uint64_t mix64(uint64_t z) {
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9, z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return z ^ z >> 31;
}
static void make_slot_tags(void) {  // of every slot the first text of three characters that CRC16 puts there
    for (int n = (1 << 18) - 1; n >= 0; n--) {
        char text[3] = {ALPHABET[n >> 12], ALPHABET[n >> 6 & 63], ALPHABET[n & 63]};
        uint16_t crc = 0;
        for (int bit = 0; bit < 24; bit++) crc = crc << 1 ^ ((crc >> 15 ^ text[bit / 8] >> (7 - bit % 8)) & 1 ? 0x1021 : 0);
        memcpy(slot_tags[crc % N_SLOTS], text, 3);
    }
}
// --- the cluster as it was read last: connections, the map, the table
enum { INFO, MARKER, MAP, TABLES };  // what a node was asked first
typedef struct { char address[300]; int asked; redisContext *link; redisReply *first[4]; } Node;
static Node nodes[MOST_NODES];
static int n_nodes, owners[N_SLOTS], bits;
static Item map, identity;  // identity: a marker of the cluster
static uint64_t map_digest, former_digest, check_key, schema, dim, row_bytes, size_bytes;
static char tag[3], dtype[16];
static void forget(void) {
    for (; n_nodes; n_nodes--) {
        Node *node = &nodes[n_nodes - 1];
        redisFree(node->link);
        for (int i = 0; i < 4; i++) freeReplyObject(node->first[i]);
    }
}
static redisReply *reply_of(Node *node) {
    redisReply *reply = NULL;
    if (redisGetReply(node->link, (void **)&reply) != REDIS_OK) fail(LOST_NODE, "node %s: %s", node->address, node->link->errstr);
    if (reply->type == REDIS_REPLY_ERROR) fail(LOST_NODE, "node %s: %s", node->address, reply->str);
    return reply;
}
static Node *opened(const char *address, size_t length) {  // marker, map and registry are read, and judged where they are used
    for (int i = 0; i < n_nodes; i++)
        if (strlen(nodes[i].address) == length && !memcmp(nodes[i].address, address, length)) return &nodes[i];
    if (n_nodes == MOST_NODES || length >= sizeof nodes->address) fail(USAGE, "too many nodes, or too long an address");
    Node *node = memset(&nodes[n_nodes++], 0, sizeof *node);
    char host[300], *colon = strrchr(strcpy(host, memcpy(node->address, address, length)), ':');
    if (!colon) fail(USAGE, "%s: give host:port", node->address);
    *colon = 0;
    node->link = redisConnectWithTimeout(host, atoi(colon + 1), left(0.5));  // a node that hangs leaves time for the others
    redisSetTimeout(node->link, left(0.5));
    static const char *const asks[] = {"INFO server", "GET kvemb:marker", "GET kvemb:map", "GET kvemb:tables"};
    for (int i = 0; i < 4 && !node->link->err; i++) redisAppendCommand(node->link, asks[i]);
    for (int i = 0; i < 4 && !node->link->err; i++) redisGetReply(node->link, (void **)&node->first[i]);
    return node;
}
static uint64_t digest_of_map(uint64_t serial, Item of_nodes, Item of_shards) {
    packed.n = 0, add_byte(&packed, 0x93), add_uint(&packed, serial), add_item(&packed, of_nodes), add_item(&packed, of_shards);
    part('s', "cluster map", 11), part('b', packed.data, packed.n);
    return digest();
}
static void settle_table(Item table, Item name) {
    Item optimizer = get(table, "optimizer"), kind = get(optimizer, "kind"), momentum = get(optimizer, "momentum"), it;
    Item initializer = get(table, "initializer"), algorithm = get(table, "init_algorithm"), n_buckets = get(table, "n_buckets");
    if (get(table, "num_ids").kind) fail(WRONG_RECORD, "the table has num_ids: its rows lie in pages, which this program does not read");
    packed.n = 0, add_byte(&packed, 0x80 | (9 + !!get(table, "life").kind));
    static const char *const plain[] = {"name", "dim", "dtype", "id_dtype", "optimizer", "initializer", "seed", "reduce", "life"};
    for (int i = 0; i < 9; i++) {
        if (!(it = get(table, plain[i])).kind) continue;
        add_text(&packed, plain[i]);
        if (i == 5) {
            add_byte(&packed, 0x80 | (initializer.n + 1)), add(&packed, initializer.body, initializer.end - initializer.body);
            add_text(&packed, "algorithm"), add_uint(&packed, algorithm.kind ? algorithm.n : 1);
        } else if (i != 4) add_item(&packed, it);
        else {
            static const char *const options[] = {"nesterov", "amsgrad", "centered", "initial_accumulator_value"};
            int n_options = !!momentum.kind;
            for (int j = 0; j < 4; j++) n_options += !!get(optimizer, options[j]).kind;
            add_byte(&packed, 0x83), add_text(&packed, "kind"), add_item(&packed, kind), add_text(&packed, "options");
            add_byte(&packed, 0x80 | n_options);
            if (momentum.kind) add_text(&packed, "momentum"), add_byte(&packed, momentum.n << 1 ? 0xc3 : 0xc2);
            for (int j = 0; j < 4; j++)
                if ((it = get(optimizer, options[j])).kind) add_text(&packed, options[j]), add_item(&packed, it);
            Item transforms = get(optimizer, "transforms");
            add_text(&packed, "transforms"), add_byte(&packed, 0x90 | (transforms.kind ? transforms.n : 0));
            for (uint64_t j = 0; transforms.kind && j < transforms.n; j++) add_item(&packed, get(at(transforms, j), "kind"));
        }
    }
    uint64_t n = n_buckets.kind ? n_buckets.n : 256, number, attempt = get(table, "tag_attempt").n;
    add_text(&packed, "n_buckets"), add_uint(&packed, n);
    part('s', "schema", 6), part('b', packed.data, packed.n), schema = digest() & 255;
    part('s', "id check", 8), part('s', name.body, name.n), check_key = digest();
    part('s', "table tag", 9), part('s', name.body, name.n), part('i', &attempt, 1), number = digest();
    for (int i = 0; i < 3; i++) tag[i] = ALPHABET[number >> (58 - 6 * i) & 63];
    for (bits = 0; 1ull << bits < n;) bits++;
    it = get(table, "dtype"), snprintf(dtype, sizeof dtype, "%.*s", (int)it.n, (const char *)it.body);
    uint64_t state = is(kind, "sgd") ? 0 : is(kind, "adam") || is(kind, "adamw") || is(kind, "ftrl") ? 2 : 1;
    state += !!(momentum.n << 1) + get(optimizer, "amsgrad").n + get(optimizer, "centered").n;
    dim = get(table, "dim").n, row_bytes = dim * (strcmp(dtype, "float32") ? 2 : 4);
    size_bytes = 12 + row_bytes + 4 * (is(kind, "rowwise_adagrad") ? 1 : state * dim);
}
static int has(const Node *node, int which) { return node->first[which] && node->first[which]->type == REDIS_REPLY_STRING; }
static int same(Item one, Item other) {
    return one.end - one.begin == other.end - other.begin && !memcmp(one.begin, other.begin, one.end - one.begin);
}
static void load(const char *seeds, const char *name) {  // the newest map and registry that any node has
    Item registry = {0}, table = {0}, runs, plan;
    map = identity = (Item){0}, sum.n = 0;
    for (const char *seed = seeds; *seed; seed += strcspn(seed, ","), seed += *seed == ',') opened(seed, strcspn(seed, ","));
    for (int i = 0; i < n_nodes; i++) {  // nodes that a map names come behind the seeds
        Node *node = &nodes[i];
        if (!identity.kind && has(node, MARKER)) identity = decode(node->first[MARKER], "kvemb-marker", 5, 6);
        if (has(node, TABLES)) {
            Item it = decode(node->first[TABLES], "kvemb-tables", 1, 2);
            if (!registry.kind || at(it, 2).n > at(registry, 2).n) registry = it;
        }
        if (!has(node, MAP)) continue;
        Item it = decode(node->first[MAP], "kvemb-map", 2, 3), places = at(it, 8);
        if (!map.kind || at(it, 2).n > at(map, 2).n) map = it;
        for (uint64_t j = 0; j < places.n; j++)
            if (!is(at(at(places, j), 1), "gone")) opened((char *)at(at(places, j), 0).body, at(at(places, j), 0).n);
    }
    if (!map.kind || !identity.kind) fail(LOST_NODE, "no node that answers has a marker, or a cluster map");
    runs = at(map, 5), plan = at(map, 10);
    for (uint64_t i = 0; i + 4 <= runs.n; i += 4)
        for (int slot = runs.body[i] | runs.body[i + 1] << 8; slot < N_SLOTS; slot++) owners[slot] = runs.body[i + 2] | runs.body[i + 3] << 8;
    map_digest = former_digest = digest_of_map(at(map, 3).n, runs, at(map, 7));
    if (plan.kind == 'a' && (is(at(plan, 1), "flipped") || is(at(plan, 1), "serving"))) {
        int of_nodes = is(at(plan, 0), "nodes");  // the plan has the former owners
        former_digest = digest_of_map(at(map, 3).n - 1, of_nodes ? at(plan, 2) : runs, of_nodes ? at(map, 7) : at(plan, 2));
    }
    for (uint64_t i = 0; registry.kind && i < at(registry, 3).n; i++)
        if (is(get(at(at(registry, 3), i), "name"), name)) table = at(at(registry, 3), i);
    if (!table.kind) fail(WRONG_RECORD, "there is no table %s", name);
    settle_table(table, get(table, "name"));
}
static void judge(const Node *node, const redisReply *found, uint64_t number) {  // may rows of node `number` be taken from there?
    const char *where = node->address;
    if (node->link->err) fail(LOST_NODE, "node %s: %s", where, node->link->errstr);
    if (!has(node, INFO)) fail(LOST_NODE, "node %s: %s", where, node->first[INFO]->str);
    if (!found || found->type != REDIS_REPLY_STRING) fail(LOST_NODE, "node %s: its marker is gone: the server was emptied, and its rows are lost there", where);
    Item marker = decode(found, "kvemb-marker", 5, 6), run_id = at(marker, 7);
    if (!same(at(marker, 2), at(identity, 2)) || at(marker, 3).n != number) fail(LOST_NODE, "node %s: is not node %d", where, (int)number);
    uint64_t digest = at(marker, 5).n, serial = at(marker, 6).n;
    if (!(digest == map_digest && serial == at(map, 3).n) && !(digest == former_digest && serial == at(map, 3).n - 1))
        fail(STALE_MAP, "node %s follows serial %d, this program %d", where, (int)serial, (int)at(map, 3).n);
    if (!same(at(marker, 4), at(identity, 4))) fail(LOST_NODE, "node %s: was emptied and provisioned again", where);
    if (marker.n > 9 && at(marker, 9).n) fail(LOST_NODE, "node %s: its rows are being brought back", where);
    const char *told = strstr(node->first[INFO]->str, "run_id:");
    if (!told || strncmp(told + 7, (char *)run_id.body, run_id.n)) fail(LOST_NODE, "node %s: was started again, its rows may be old", where);
}
static Node *node_of(uint64_t number) {  // proven by its marker, else where the map says
    Node *found = NULL;
    for (int i = n_nodes - 1; i >= 0; i--) {
        if (!has(&nodes[i], MARKER)) continue;
        Item marker = decode(nodes[i].first[MARKER], "kvemb-marker", 5, 6);
        if (at(marker, 3).n == number && same(at(marker, 2), at(identity, 2))) found = &nodes[i];
    }
    if (!found && at(map, 8).n <= number) fail(LOST_NODE, "node %d: it is not at any of these addresses", (int)number);
    if (!found) found = opened((char *)at(at(at(map, 8), number), 0).body, at(at(at(map, 8), number), 0).n);
    judge(found, found->first[MARKER], number);
    return found;
}
static float half(unsigned bits16) {
    int exponent = bits16 >> 10 & 31, fraction = bits16 & 1023;
    float value = exponent == 31 ? (fraction ? NAN : INFINITY) : exponent ? ldexpf(1024 + fraction, exponent - 25) : ldexpf(fraction, -24);
    return bits16 >> 15 ? -value : value;
}
static void pull(const uint64_t *ids, char *const *texts, int n) {
    static redisReply **rows, *last;
    static Node **where, *of_number[1 << 16];
    static int n_rows;
    while (n_rows) freeReplyObject(rows[--n_rows]);
    rows = realloc(rows, (n + 1) * sizeof *rows), where = realloc(where, (n + 1) * sizeof *where), memset(of_number, 0, sizeof of_number);
    for (int i = 0; i < n_nodes; i++) nodes[i].asked = 0;
    for (int i = 0; i < n; i++) {
        uint64_t bucket = bits ? mix64(ids[i]) >> (64 - bits) : 0, slot = bits <= 14 ? bucket << (14 - bits) : bucket >> (bits - 14);
        char key[12] = {tag[0], tag[1], tag[2], '{', slot_tags[slot][0], slot_tags[slot][1], slot_tags[slot][2], '}'};
        uint64_t sub = bits > 14 ? bucket & ((1ull << (bits - 14)) - 1) : 0;
        for (int j = 0; j < 3; j++) key[8 + j] = ALPHABET[sub >> (12 - 6 * j) & 63];
        Node **node = &of_number[owners[slot]];
        where[i] = *node ? *node : (*node = node_of(owners[slot])), where[i]->asked = 1;
        redisAppendCommandArgv(where[i]->link, 3, (const char *[]){"HGET", key, (const char *)&ids[i]}, (size_t[]){4, bits > 14 ? 11 : 8, 8});
    }
    for (int i = 0, done; i < n_nodes; i++)
        if (nodes[i].asked) {
            redisAppendCommand(nodes[i].link, "GET kvemb:marker"), redisSetTimeout(nodes[i].link, left(1));
            do if (redisBufferWrite(nodes[i].link, &done) != REDIS_OK) fail(LOST_NODE, "node %s: %s", nodes[i].address, nodes[i].link->errstr);
            while (!done);
        }
    for (int i = 0; i < n; i++) rows[i] = reply_of(where[i]), n_rows++;
    for (int i = 0; i < n_nodes; i++)
        if (nodes[i].asked) {  // the marker was read behind all rows of this connection: it vouches for them
            const redisReply *before = nodes[i].first[MARKER];
            freeReplyObject(last), last = NULL, last = reply_of(&nodes[i]);
            if (last->len == before->len && !memcmp(last->str, before->str, last->len)) continue;
            judge(&nodes[i], last, at(decode(before, "kvemb-marker", 5, 6), 3).n), fail(STALE_MAP, "node %s: its marker was renewed", nodes[i].address);
        }
    for (int i = 0; i < n; i++) {
        uint32_t word, expected = (uint32_t)(mix64(ids[i] ^ check_key) >> 40) << 8 | schema;
        if (rows[i]->type != REDIS_REPLY_STRING) continue;
        if ((uint64_t)rows[i]->len != size_bytes || memcmp(&expected, memcpy(&word, rows[i]->str, 4), 4))
            fail(WRONG_RECORD, "node %s: the value of id %s is not this row's record", where[i]->address, texts[i]);
    }
    for (int i = 0; i < n; i++) {
        const char *record = rows[i]->str;
        if (!record && printf("{\"id\": %s, \"missing\": true}\n", texts[i])) continue;
        uint64_t version;
        memcpy(&version, record + 4, 8);
        printf("{\"id\": %s, \"epoch\": %u, \"k\": %llu, \"row\": \"", texts[i], (unsigned)(version >> 48), (unsigned long long)version << 16 >> 16);
        for (uint64_t j = 0; j < dim; j++) {
            uint32_t word = 0;
            float value;
            memcpy(&word, record + 12 + j * row_bytes / dim, row_bytes / dim);
            if (!strcmp(dtype, "bfloat16")) word <<= 16;
            if (!strcmp(dtype, "float16")) value = half(word), memcpy(&word, &value, 4);
            printf("%02x%02x%02x%02x", word & 255, word >> 8 & 255, word >> 16 & 255, word >> 24);
        }
        puts("\"}");
    }
    fflush(stdout);
}
int main(int n_args, char **args) {  // addresses, table, seconds; on stdin a line of ids for each batch
    static char *line, **texts;
    static uint64_t *ids;
    static size_t size;
    static int n, n_lost;
    static const char *const names[] = {"", "", "usage", "lost node", "stale map", "wrong record"};
    if (n_args < 3) return fputs("usage: reader HOST:PORT,HOST:PORT TABLE [TIMEOUT_S] < lines of ids\n", stderr), USAGE;
    signal(SIGPIPE, SIG_IGN);  // a connection that was closed is an error of its own
    for (make_slot_tags(); getline(&line, &size, stdin) > 0;) {
        n = n_lost = 0, deadline_s = now_s() + (n_args > 3 ? atof(args[3]) : 5);
        texts = realloc(texts, size * sizeof *texts), ids = realloc(ids, size * sizeof *ids);  // more than there are words
        for (char *end, *text = strtok(line, " \n"); text; text = strtok(NULL, " \n")) {
            texts[n] = text, errno = 0, ids[n++] = strtoull(text, &end, 10);
            if (*end || end == text || errno) return fprintf(stderr, "usage: %s is no id\n", text), USAGE;
        }
        for (int why; (why = setjmp(failed)) || n;) {
            if (!why) {
                if (!n_nodes) load(args[1], args[2]);
                pull(ids, texts, n);
                break;
            }
            int over = why == USAGE || now_s() > deadline_s || (why != STALE_MAP && n_lost++);
            fprintf(stderr, "%s: %s%s\n", names[why], said, over ? "" : "; reading the map again");
            if (over) return why;
            forget(), nanosleep(&(struct timespec){0, 20000000}, NULL);
        }
    }
    return 0;
}
