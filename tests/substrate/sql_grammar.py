"""A seeded grammar of SELECT statements, clean ones and hostile ones, for both engines' dialects.

A clean statement is well typed over what the attacker may read, so it should run. A spiked one is a clean one with
hostile fragments grown into it, a hostile one is an attack by itself, a mangled one is any of them with its text
damaged. The attacker knows the hidden and physical names, which is more than a real one would.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field
from typing import Any

Columns = dict[str, str]  # column -> "int" | "text"
Scope = list[tuple[str, Columns]]  # alias, columns


@dataclass(frozen=True)
class Names:
    """What the attacker knows of the layer."""

    readable: dict[str, Columns]
    hidden: tuple[str, ...]  # entities without a grant, system entities
    hidden_columns: tuple[str, ...]
    physical: tuple[str, ...] = ()  # tables, views, sequences as the database spells them
    branches: tuple[str, ...] = ("main",)
    first_tx: int = 1  # from when on what is readable was there
    last_tx: int = 10
    scratch: str = "/tmp/never"  # a directory where a file may never appear


@dataclass(frozen=True)
class Statement:
    sql: str
    params: dict[str, Any] = field(default_factory=dict)
    branch: str = "main"
    as_of: int | None = None
    kind: str = "clean"  # clean spiked hostile mangled bomb


# What each engine must refuse whatever surrounds it. {scratch} is a directory, {physical} a stored table's name.
RELATIONS = {
    "sqlite": """
        sqlite_master | sqlite_schema | sqlite_temp_master | sqlite_temp_schema | main.sqlite_master | main.sqlite_schema
        temp.sqlite_master | temp.sqlite_temp_schema | "sqlite_master" | [sqlite_schema] | `sqlite_master` | SQLITE_MASTER
        sqlite_sequence | sqlite_stat1 | sqlite_stat4 | dbstat | sqlite_dbpage | sqlite_stmt | sqlite_dbdata('main')
        bytecode('select 1') | tables_used('select * from item') | pragma_table_info('item') | pragma_table_xinfo('item')
        pragma_table_list | pragma_database_list | pragma_function_list | pragma_compile_options | pragma_module_list
        pragma_index_list('item') | pragma_user_version | pragma_collation_list | pragma_query_only | pragma_foreign_key_list('item')
        pragma_wal_checkpoint | pragma_integrity_check | pragma_schema_version | pragma_data_version | pragma_journal_mode
        temp.pragma_table_list | main.item | main."item" | "main".item | main.item__history | main.{physical} | temp.{physical}
        fsdir('/') | zipfile('{scratch}/z') | csv('{scratch}/c') | carray(1, 2) | fts5vocab | rtree_i32 | wholenumber
        {physical} | "{physical}" | [{physical}] | nosuch | nosuch.item | aux.item | item indexed by nosuch
    """,
    "postgres": """
        pg_class | pg_catalog.pg_class | "pg_catalog"."pg_class" | pg_catalog . pg_class | PG_CLASS | U&"pg\\005fclass"
        pg_roles | pg_authid | pg_shadow | pg_user | pg_group | pg_stats | pg_statistic | pg_statistic_ext_data | pg_views | pg_tables
        pg_matviews | pg_rules | pg_policies | pg_indexes | pg_sequences | pg_proc | pg_attribute | pg_settings | pg_file_settings
        pg_hba_file_rules | pg_ident_file_mappings | pg_config | pg_config() | pg_stat_activity | pg_stat_user_tables | pg_stat_database
        pg_locks | pg_largeobject | pg_largeobject_metadata | pg_depend | pg_rewrite | pg_namespace | pg_database | pg_tablespace
        pg_cursors | pg_prepared_statements | pg_prepared_xacts | pg_replication_slots | pg_available_extensions | pg_timezone_names
        pg_description | pg_trigger | pg_constraint | pg_index | pg_type | pg_operator | pg_enum | pg_seclabels | pg_db_role_setting
        pg_ls_dir('.') | pg_ls_logdir() | pg_ls_waldir() | pg_ls_tmpdir() | pg_ls_dir('/') | pg_read_file('/etc/passwd')
        pg_stat_file('/etc/passwd') | pg_catalog.pg_read_file('/etc/passwd') | pg_show_all_settings() | pg_lock_status()
        pg_stat_get_activity(null) | pg_get_keywords() | pg_options_to_table('{{a=1}}'::text[]) | pg_logical_slot_get_changes('a', null, null)
        information_schema.tables | information_schema.columns | information_schema.views | information_schema.schemata
        information_schema.role_table_grants | information_schema.enabled_roles | information_schema.routines
        livinglayer.item | livinglayer.{physical} | "livinglayer"."{physical}" | only livinglayer.{physical} | public.item | {physical}
        pg_temp.item | pg_toast.pg_toast_1255 | nosuch | dblink('dbname=postgres', 'select 1') as t(a int)
        ts_stat('select to_tsvector(secret) from livinglayer.item') | query_to_xml('select 1', true, true, '')
        rows from (pg_ls_dir('.')) as t(a) | lateral pg_ls_dir('.') | json_populate_recordset(null::pg_authid, '[]')
        {physical} tablesample system (100) | nosuch.item
    """,
}

VALUES = {
    "sqlite": """
        load_extension('{scratch}/x.so') | load_extension('x', 'y') | readfile('/etc/passwd') | writefile('{scratch}/w', 'x') | edit('x')
        fts3_tokenizer('simple') | fts3_tokenizer('x', x'00') | sqlite_log(1, 'x') | sqlite_compileoption_get(1)
        (select sql from sqlite_master limit 1) | (select group_concat(name) from sqlite_schema) | (select count(*) from main.item)
        (select secret from item limit 1) | item.secret | item.owner | item.price | main.item.secret | temp.item.secret | part.hidden
        (select label from secret_thing) | (select max(name) from principal) | (select reason from tx limit 1)
        (select name from pragma_table_info('item')) | (select file from pragma_database_list) | raise(abort, 'x')
        nosuch(1) | item._tx | main.nosuch(1)
    """,
    "postgres": """
        set_config('role', 'postgres', false) | set_config('search_path', 'livinglayer', false) | set_config('statement_timeout', '0', false)
        pg_catalog.set_config('a.b', 'c', true) | "set_config"('a.b', 'c', false) | U&"set\\005fconfig"('a.b', 'c', false)
        current_setting('data_directory') | current_setting('search_path') | current_setting('is_superuser', true)
        pg_read_file('/etc/passwd') | pg_read_binary_file('/etc/passwd') | pg_stat_file('PG_VERSION') | pg_ls_dir('.')
        convert_from(pg_read_binary_file('PG_VERSION'), 'utf8') | lo_import('/etc/passwd') | lo_create(0) | lo_creat(-1) | lo_unlink(1)
        lo_from_bytea(0, 'x'::bytea) | lo_put(1, 0, 'x'::bytea) | lo_get(1) | lo_export(1, '{scratch}/lo') | lo_open(1, 131072)
        dblink('dbname=postgres', 'select 1') | dblink_exec('dbname=postgres', 'drop table x') | pg_sleep(30) | pg_sleep_for('30 s')
        pg_catalog.pg_sleep(30) | "pg_sleep"(30) | PG_SLEEP(30) | pg_sleep_until('2100-01-01') | pg_advisory_lock(7) | pg_advisory_lock_shared(7)
        pg_try_advisory_lock(7) | pg_advisory_xact_lock(7) | pg_try_advisory_xact_lock(7, 8) | pg_advisory_unlock_all()
        pg_terminate_backend(pg_backend_pid()) | pg_cancel_backend(pg_backend_pid()) | pg_reload_conf() | pg_rotate_logfile()
        pg_switch_wal() | pg_create_restore_point('x') | pg_backup_start('x') | pg_promote() | pg_export_snapshot() | txid_current()
        pg_current_xact_id() | pg_current_wal_lsn() | nextval('livinglayer.{sequence}') | setval('livinglayer.{sequence}', 1) | lastval()
        currval('{sequence}') | pg_sequence_last_value('{sequence}') | pg_notify('a', 'b') | pg_listening_channels()
        pg_logical_emit_message(true, 'a', 'b') | pg_create_logical_replication_slot('a', 'test_decoding') | pg_drop_replication_slot('a')
        pg_replication_origin_create('a') | query_to_xml('select * from livinglayer.{physical}', true, true, '')
        query_to_xml_and_xmlschema('select 1', true, true, '') | table_to_xml('livinglayer.{physical}', true, true, '')
        table_to_xmlschema('item', true, true, '') | schema_to_xml('livinglayer', true, true, '') | database_to_xml(true, true, '')
        database_to_xmlschema(true, true, '') | cursor_to_xml('c', 1, true, true, '') | ts_rewrite('a'::tsquery, 'select ''a''::tsquery, ''b''::tsquery')
        has_table_privilege('livinglayer.{physical}', 'select') | has_schema_privilege('livinglayer', 'usage') | pg_has_role('postgres', 'member')
        pg_get_viewdef('item'::regclass) | pg_get_viewdef('item') | pg_get_functiondef(1255) | pg_get_ruledef(1) | pg_get_userbyid(10)
        pg_relation_filepath('item') | pg_relation_size('livinglayer.{physical}') | pg_table_size('item') | pg_total_relation_size('item')
        pg_database_size('postgres') | obj_description(1255, 'pg_class') | col_description('item'::regclass, 1) | shobj_description(1, 'pg_database')
        to_regclass('livinglayer.{physical}') | 'item'::regclass::oid | 'livinglayer.{physical}'::regclass | cast('pg_read_file' as regproc)
        1255::regclass | 10::oid::regrole | cast('livinglayer' as regnamespace) | 'postgres'::regrole | 'pg_class'::regtype | regclass 'item'
        current_user | session_user | current_role | user | current_schema | current_schemas(true) | current_database() | current_catalog
        inet_server_addr() | inet_server_port() | inet_client_addr() | pg_backend_pid() | pg_postmaster_start_time() | pg_conf_load_time()
        item.tableoid::regclass | item.secret | item.owner | item.price | (item).secret | (item).owner | part.hidden
        (select label from secret_thing limit 1) | (select max(name) from principal) | (select reason from tx limit 1)
        (select string_agg(rolname, ',') from pg_roles) | (select secret from livinglayer.item limit 1) | hstore(item) | nosuch(1)
        pg_stat_get_backend_activity(1) | pg_show_all_file_settings() | pg_current_logfile() | pg_blocking_pids(1) | pg_jit_available()
        binary_upgrade_set_next_pg_type_oid(1) | pg_import_system_collations('pg_catalog') | plpgsql_call_handler() | pg_stat_reset()
        pg_replication_slot_advance('a', '0/1') | pg_walfile_name('0/1') | pg_control_system() | pg_promote(false) | pg_log_backend_memory_contexts(1)
        pg_tablespace_location(1663) | pg_size_pretty(pg_database_size('postgres')) | pg_collation_actual_version(100) | pg_is_in_recovery()
        getdatabaseencoding() | pg_client_encoding() | convert_to(current_setting('port'), 'utf8') | brin_summarize_new_values('item')
        gin_clean_pending_list('item') | pg_stat_get_snapshot_timestamp() | pg_trigger_depth() | pg_event_trigger_table_rewrite_oid()
        json_populate_record(null::livinglayer.{physical}, '{{}}') | null::pg_authid | row(1)::pg_class | inet_server_addr()::text
    """,
}

STATEMENTS = {
    "sqlite": """
        attach ':memory:' as z ¦ attach '{scratch}/a.db' as z ¦ attach database 'file:{scratch}/a.db?mode=rwc' as z ¦ detach main ¦ detach temp
        pragma query_only = 0 ¦ pragma table_info(item) ¦ pragma database_list ¦ pragma writable_schema = on ¦ pragma journal_mode = delete
        pragma main.user_version = 9 ¦ pragma temp_store_directory = '{scratch}' ¦ pragma wal_checkpoint(truncate) ¦ pragma trusted_schema = 1
        pragma hard_heap_limit = 0 ¦ pragma cell_size_check = 0 ¦ pragma optimize ¦ pragma integrity_check ¦ pragma incremental_vacuum
        vacuum ¦ vacuum into '{scratch}/v.db' ¦ vacuum main into '{scratch}/v.db' ¦ reindex ¦ analyze ¦ analyze main.item
        explain select * from item ¦ explain query plan select * from item ¦ EXPLAIN/**/select 1 ¦ begin ¦ begin immediate ¦ commit ¦ rollback
        end ¦ savepoint a ¦ release a ¦ insert into item (name) values ('x') ¦ insert into item (name) values ('x') returning *
        replace into item (id, name) values (1, 'x') ¦ insert or ignore into item (name) values ('x') on conflict do nothing
        update item set qty = 0 ¦ update item set qty = 0 returning * ¦ update or replace main.item set qty = 0 ¦ delete from item
        delete from main.{physical} returning * ¦ delete from sqlite_master ¦ with x as (select 1) insert into item (name) select 'x'
        with x as (select 1) update item set qty = 1 ¦ with x as (select 1) delete from item ¦ create table z (a) ¦ create temp table z (a)
        create temp view z as select * from main.item ¦ create temp view item as select * from main.item ¦ create index z on item (name)
        create trigger z after insert on item begin select 1; end ¦ create temp trigger z instead of insert on item begin select 1; end
        create virtual table z using fts5(a) ¦ create virtual table temp.z using rtree(a, b, c) ¦ create virtual table z using dbstat(main)
        create table z as select * from item ¦ drop table item ¦ drop view item ¦ drop view temp.item ¦ drop index if exists x
        alter table main.{physical} rename to z ¦ alter table item add column z ¦ table item ¦ select * into z from item
        select * from item; select 1 ¦ select 1; drop view temp.item ¦ select 1; attach ':memory:' as z ¦ ;; select 1; select 2
        select * from item for update ¦ select * from item as of 1 ¦ set role x ¦ copy item to stdout ¦ .dump ¦ .shell id ¦ call x()
    """,
    "postgres": """
        set role postgres ¦ reset role ¦ set session authorization postgres ¦ reset session authorization ¦ set local role none ¦ reset all
        discard all ¦ discard plans ¦ set search_path = livinglayer ¦ set session characteristics as transaction read write
        set default_transaction_read_only = off ¦ set statement_timeout = 0 ¦ set transaction read write ¦ set timezone = 'Asia/Tokyo'
        set work_mem = '1GB' ¦ set local temp_file_limit = -1 ¦ set row_security = off ¦ set bytea_output = 'escape' ¦ set standard_conforming_strings = off
        show all ¦ show data_directory ¦ show search_path ¦ begin ¦ begin read write ¦ start transaction ¦ commit ¦ rollback ¦ abort ¦ end
        commit; set role postgres ¦ savepoint a ¦ release savepoint a ¦ prepare transaction 'x' ¦ commit prepared 'x'
        explain select * from item ¦ explain analyze select * from item ¦ explain (verbose, format json) select * from item
        insert into item (name) values ('x') ¦ insert into item (name) values ('x') returning * ¦ update item set qty = 0 ¦ update item set qty = 0 returning *
        delete from item ¦ delete from item returning * ¦ truncate livinglayer.{physical} ¦ merge into item using (select 1) s on true when matched then delete
        with x as (insert into item (name) values ('x') returning *) select * from x ¦ with x as (delete from item returning *) select * from x
        with x as (update item set qty = 1 returning *) select * from x ¦ with x as (delete from livinglayer.{physical} returning *) select count(*) from x
        with x as (select 1) insert into item (name) select 'x' ¦ with x as (select 1) delete from item ¦ with x as materialized (update item set qty = 1 returning 1) table x
        select * into z from item ¦ select * into temp z from item ¦ select 1 as a into unlogged z ¦ create table z as select * from item
        create temp table z as table item ¦ create temp table z (a int) ¦ create temp view item as select * from livinglayer.{physical} ¦ create view z as select 1
        create materialized view z as select 1 ¦ create schema z ¦ create function z() returns int language sql as 'select 1' ¦ create extension dblink
        create function pg_temp.z() returns int language sql as 'select 1' ¦ create role z superuser ¦ alter role current_user superuser ¦ alter user postgres password 'x'
        alter system set work_mem = '1GB' ¦ alter database postgres set work_mem = '1GB' ¦ alter view item owner to postgres ¦ alter default privileges grant select on tables to public
        grant select on livinglayer.{physical} to public ¦ grant postgres to current_user ¦ revoke all on item from public ¦ drop view item ¦ drop schema livinglayer cascade
        drop owned by current_user ¦ reassign owned by postgres to current_user ¦ comment on view item is 'x' ¦ security label on view item is 'x'
        copy item to stdout ¦ copy item from stdin ¦ copy (select * from item) to stdout ¦ copy (select 1) to '{scratch}/c' ¦ copy (select 1) to program 'touch {scratch}/p'
        copy livinglayer.{physical} to stdout ¦ copy item from program 'id' ¦ select * from item for update ¦ select * from item for share ¦ select * from item for no key update nowait
        select * from item for key share skip locked ¦ select * from item for update of item ¦ (select * from item for update) ¦ with x as (select * from item for update) select * from x
        select * from (select * from item for update) x ¦ do $$ begin perform pg_sleep(9); end $$ ¦ do language plpgsql 'begin end' ¦ call nosuch() ¦ lock table item ¦ lock table livinglayer.{physical} in access exclusive mode
        listen a ¦ notify a, 'b' ¦ unlisten * ¦ prepare p as select * from item ¦ execute p ¦ deallocate all ¦ declare c cursor for select * from item
        declare c cursor with hold for select * from item ¦ fetch all from c ¦ move 1 from c ¦ close all ¦ vacuum ¦ vacuum full ¦ analyze ¦ reindex database postgres ¦ cluster ¦ checkpoint ¦ load 'auto_explain'
        refresh materialized view z ¦ import foreign schema public from server x into y ¦ select 1; select 2 ¦ select 1; drop view item ¦ select * from item; commit; set role postgres ¦ select 1;; select 2
        create rule z as on select to item do instead select 1 ¦ create trigger z after insert on item execute function z() ¦ create event trigger z on ddl_command_start execute function z()
    """,
}

# Fragments that may run, as long as nothing hidden comes out.
PUZZLES = {
    "sqlite": """
        item.rowid | rowid | oid | _rowid_ | "secret" | "owner" | 'secret' | typeof(name) | sqlite_version() | sqlite_source_id() | sqlite_offset(name)
        last_insert_rowid() | changes() | total_changes() | quote(name) | hex(name) | unhex('41') | unicode(name) | char(65, 0, 66) | json_array(name, qty)
        json_object('a', name) | json_extract('{{"a": 1}}', '$.a') | json(name) | name -> '$' | abs(-9223372036854775808) | 9223372036854775807 + 1 | 1 / 0
        -9223372036854775808 / -1 | sum(9223372036854775807) over () | x'00ff' | 0x7fffffffffffffff | 1e999 | -1e999 | name collate nocase | name collate nosuch
        name glob '*' | name regexp 'a' | name match 'a' | likely(1) | iif(qty, 1, 2) | printf('%s', name) | format('%d', qty) | strftime('%s', 'now') | random()
        :me | :n | @me | $me | ?1 | :me.team | (select count(*) from item) | (values (1)) | exists (select 1) | row_number() over () | soundex(name) | 'a' || x'00'
        cast(name as blob) | substr(name, -1, 1) | instr(name, 'x') | zeroblob(3) | randomblob(3) | name is not distinct from 'x' | (1, 2) = (1, 2) | nullif(qty, 3)
        like('%', name) | glob('*', name) | octet_length(name) | concat_ws(',', name, qty) | string_agg(name, ',') | timediff('now', 'now') | json_quote(name) | subtype(name)
        median(qty) | percentile(qty, 50) | if(qty, 1) | unistr('\\0041') | jsonb(name) | json_error_position(name) | json_group_array(name) | true | current_timestamp
        sum('1e999999999') | sum('inf') over () | sum('nan') | sum('snan') | sum(x'00') | sum(name) | total(name) | avg('x') | sum(case qty when 3 then 'inf' else '-inf' end)
        '1e999999999' > '2' collate exact | 'snan' < 'nan' collate exact | max('nan' collate exact, '1') | name collate exact | count(distinct name collate exact)
        layer_convert('text', 'int', name) | unixepoch('now') | julianday('x') | json_extract(name, name) | printf('%n', 1) | printf('%q %Q %w', name, name, name)
    """,
    "postgres": """
        item.ctid | ctid | xmin | tableoid | item.tableoid | item | item.* | (item).name | row(item.*) | row_to_json(item) | to_jsonb(item) | item::text
        pg_typeof(name) | pg_typeof(item) | pg_column_size(name) | version() | now() | clock_timestamp() | current_timestamp | random() | gen_random_uuid()
        1 / 0 | 9223372036854775807 + 1 | abs((-9223372036854775808)::bigint) | 'x'::int | name::int | name::json | name::date | name::xml | '(1,2)'::point
        E'a\\x62\\'' | E'\\u0061' | U&'\\0061' | U&'!0061' uescape '!' | $$a$$ | $q$a$q$ | B'101' | X'1f' | N'a' | 'a' 'b' | 1 operator(pg_catalog.+) 1
        name collate "C" | name collate "nosuch" | name ~ '^(a+)+$' | name similar to 'a%' | regexp_replace(name, 'a', 'b') | array[1, 2] | array[name] | (array[1, 2])[1]
        array(select qty from item) | row(1, 2) = row(1, 2) | (1, 2) < (1, 3) | any_value(name) | :me | :n | %(n)s | %s | $1 | :me.team | (select count(*) from item) | exists (select 1)
        interval '1 day' | date '2020-01-01' | extract(year from date '2020-01-01') | now() at time zone 'utc' | position('a' in name) | overlay(name placing 'x' from 1)
        string_agg(name, ',') | json_agg(item) | array_agg(qty) | count(*) filter (where qty > 1) | percentile_cont(0.5) within group (order by qty) | mode() within group (order by qty)
        row_number() over () | grouping(qty) | coalesce(name, 'x') | greatest(qty, 1) | num_nonnulls(1, null) | '{{"a": 1}}'::jsonb -> 'a' | '{{"a": 1}}'::jsonb @> '{{}}'
        xmlelement(name a, name) | xmlparse(content '<a/>') | xpath('//a', '<a/>') | to_tsvector(name) | to_char(qty, '999') | convert_to(name, 'utf8') | encode('a', 'hex') | md5(name)
        sha256(name::bytea) | chr(0) | chr(65) | ascii(name) | quote_ident(name) | quote_literal(name) | format('%I', name) | translate(name, 'a', 'b') | name like any (array['a']) | qty = all (array[1])
        case when name like 'z%' then 1 / 0 end | (values (1)) | not null | null::text | true is not unknown | name is document | qty::numeric(9, 2) | setseed(0.1) | width_bucket(1, 0, 9, 3)
    """,
}

SIDE_RELATIONS = {
    "sqlite": """
        json_each('[1, 2]') | json_tree('{{"a": [1]}}') | generate_series(1, 3) | (values (1), (2)) | temp.item | "item" | [item] | `item` | ITEM | item not indexed
        item cross join item as i2 | item natural join item as i2 | (item) | (item join part) | item left join part using (id) | item full join part on true
    """,
    "postgres": """
        generate_series(1, 3) | unnest(array[1, 2]) | json_array_elements('[1]') | (values (1), (2)) v(a) | "item" | only item | item * | ITEM | U&"item" | item tablesample system (100)
        lateral (select 1) l | regexp_split_to_table('a b', ' ') | string_to_table('a,b', ',') | json_to_recordset('[{{"a": 1}}]') as t(a int) | generate_series(now(), now(), '1 day')
        xmltable('/a' passing '<a/>' columns b text path 'b') | item cross join item i2 | item natural join item i2 | (item join part using (id)) | item full join part on true | jsonb_path_query('[1]', '$[*]')
        rows from (generate_series(1, 2), generate_series(1, 3)) | item as "pg_class" | (table item) t | generate_series(1, 3) with ordinality
    """,
}

# Each tries to outlive its deadline, to eat memory or to return more than fits.
BOMBS = {
    "sqlite": """
        with recursive c(n) as (select 1 union all select n + 1 from c) select n from c
        with recursive c(n) as (select 1 union all select n + 1 from c) select count(*) from c
        with recursive c(n) as (select 1 union all select n + 1 from c) select * from c order by n desc
        with recursive c(n) as (select 1 union select n + 1 from c) select max(n) from c
        with recursive c(s) as (select 'x' union all select s || s from c) select length(s) from c
        with recursive c(s) as (select 'x' union all select s || s from c) select group_concat(s) from c
        with recursive c(s) as (select hex(zeroblob(500000)) union all select s from c) select s from c
        with recursive c(n) as (select 1 union all select n + 1 from c limit 100000000) select group_concat(n) from c
        with recursive c(n) as (select 1 union all select n + 1 from c) select json_group_array(n) from c
        with recursive c(n) as (select 1 union all select n + 1 from c) select count(distinct n) from c
        with recursive c(n) as (select 1 union all select n + 1 from c) select row_number() over (order by n desc) from c
        with recursive a(n) as (select 1 union all select n + 1 from a limit 3000), b as (select x.n from a x, a y, a z) select sum(n) from b
        select count(*) from item a, item b, item c, item d, item e, item f, item g, item h, item i, item j, item k, item l
        select a.name || b.name from item a, item b, item c, item d, item e, item f, item g, item h
        select sum(a.qty) over (order by b.qty) from item a, item b, item c, item d, item e, item f, item g, item h
        select zeroblob(1000000000) ¦ select randomblob(1000000000) ¦ select length(randomblob(900000000)) ¦ select hex(zeroblob(400000000))
        select printf('%.*c', 1000000000, 'x') ¦ select printf('%1000000000d', 1) ¦ select format('%*s', 2000000000, 'x') ¦ select length(printf('%.900000000f', 1))
        select replace(hex(zeroblob(1000000)), '0', hex(zeroblob(1000000))) ¦ select replace(replace(hex(zeroblob(20000)), '0', hex(zeroblob(20000))), '0', '00')
        select hex(zeroblob(1000000)) like '%0%0%0%0%0%0%0%0%0%0%0%0%0%1' ¦ select hex(zeroblob(20000)) like '%0%0%0%0%0%0%0%0%1' ¦ select hex(zeroblob(20000)) glob '*0*0*0*0*0*0*1'
        select hex(zeroblob(40000)) glob '*0*0*0*0*0*0*0*0*0*1' from item a, item b ¦ select json(replace(hex(zeroblob(500000)), '0', '[')) ¦ select json_array(zeroblob(10))
        select json_extract(replace(hex(zeroblob(900)), '0', '[') || replace(hex(zeroblob(900)), '0', ']'), '$') ¦ select count(*) from json_tree('[' || replace(hex(zeroblob(400000)), '0', '1,') || '1]') a, json_tree('[1,2,3,4,5,6,7,8,9]') b, item c, item d, item e, item f
        select count(*) from generate_series(1, 100000000000) ¦ select * from generate_series(1, 100000000000) order by 1 desc ¦ select instr(hex(zeroblob(400000)), hex(zeroblob(300000)) || '1')
        select (select count(*) from item b, item c, item d, item e where b.qty + c.qty > a.qty) from item a, item x, item y, item z ¦ select trim(hex(zeroblob(500000)), hex(zeroblob(500000)))
        select max(length(a.x)) from (select hex(randomblob(400000)) x from item q, item r, item s, item t order by x) a
        select hex(zeroblob(480000)) from item a, item b ¦ select replace(hex(zeroblob(4000000)), '0', char(128512)) from item ¦ select replace(hex(zeroblob(15000000)), '0', char(1)) from item
        select zeroblob(7000000) from item ¦ select sum('1e999999999'), sum('1e999999') from item ¦ select name, sum('9e999998') over (order by id) from item ¦ select format('%.500000f', 1e300) from item a, item b, item c, item d
        select 1 from item where {deep}
    """,
    "postgres": """
        with recursive c(n) as (select 1 union all select n + 1 from c) select n from c
        with recursive c(n) as (select 1::bigint union all select n + 1 from c) select count(*) from c
        with recursive c(n) as (select 1::bigint union all select n + 1 from c) select * from c order by n desc
        with recursive c(n) as (select 1::bigint union select n + 1 from c) select max(n) from c
        with recursive c(s) as (select 'x'::text union all select s || s from c) select length(s) from c
        with recursive c(s) as (select repeat('x', 1000000) union all select s from c) select s from c
        with recursive c(s) as (select 'x'::text union all select s || s from c where length(s) < 200000000) select string_agg(s, '') from c
        with recursive a(n) as (select 1 union all select n + 1 from a where n < 3000), b as (select x.n from a x, a y, a z) select sum(n) from b
        select count(*) from item a, item b, item c, item d, item e, item f, item g, item h, item i, item j, item k, item l
        select a.name || b.name from item a, item b, item c, item d, item e, item f, item g, item h
        select sum(a.qty) over (order by b.qty) from item a, item b, item c, item d, item e, item f, item g, item h
        select generate_series(1, 1000000000) ¦ select count(*) from generate_series(1, 100000000000) ¦ select * from generate_series(1, 1000000000) g order by g desc
        select repeat('x', 1000000000) ¦ select length(repeat('x', 1000000000)) ¦ select repeat(repeat('x', 1000000), 1000) ¦ select md5(repeat('x', 1000000000)) ¦ select lpad('x', 1000000000, 'y')
        select rpad('x', 1000000000) ¦ select array_fill(0, array[100000000]) ¦ select array_length(array_fill(0, array[10000, 10000]), 1) ¦ select string_agg(g::text, ',') from generate_series(1, 100000000) g
        select array_agg(g) from generate_series(1, 1000000000) g ¦ select json_agg(g) from generate_series(1, 1000000000) g ¦ select repeat('[', 100000)::json ¦ select repeat('[', 10000000)::jsonb
        select count(distinct g) from generate_series(1, 1000000000) g ¦ select regexp_replace(repeat('a', 50000), '(a*)*b', '') ¦ select repeat('a', 5000) ~ '^(((a+)+)+)+$b'
        select regexp_matches(repeat('a', 100000), '(a|aa)+$', 'g') ¦ select repeat('a', 200) ~ '(.*)(.*)(.*)(.*)(.*)(.*)(.*)(.*)\\1\\2\\3\\4\\5\\6\\7\\8x' ¦ select 'x' ~ repeat('(a?){{250}}', 200)
        select repeat('a', 20000) like repeat('%a', 4000) || 'b' ¦ select repeat('a', 100000) similar to repeat('%a', 100) || 'b' ¦ select 10::numeric ^ 100000 ^ 2 ¦ select factorial(100000) ¦ select 9.9::numeric(1000, 900) ^ 100000
        select exp(99999::numeric) * exp(99999::numeric) ¦ select ln(repeat('9', 100000)::numeric) ¦ select length((repeat('9', 130000)::numeric * repeat('9', 130000)::numeric)::text) ¦ select power(2.0, 400000.5)
        select pg_catalog.generate_series(1, 1000000000) ¦ select jsonb_path_query(('[' || repeat('1,', 500000) || '1]')::jsonb, '$[*] ? (exists($[*] ? (@ > 1)))') ¦ select xmlparse(document repeat('<a>', 100000))
        select (select count(*) from item b, item c, item d, item e where b.qty + c.qty > a.qty) from item a, item x, item y, item z
        select max(length(x)) from (select repeat(md5(g::text), 30000) x from generate_series(1, 100000) g order by 1) s
        select * from generate_series(1, 10000000) g cross join lateral (select repeat('x', 100000) y) r ¦ select repeat('x', 100000000) from generate_series(1, 50) ¦ select to_tsvector(repeat('word ', 180000)) ¦ select format('%1000000000s', 'x')
        select repeat(chr(128512), 8000000) from item ¦ select repeat(chr(1), 15000000) from item ¦ select decode(repeat('00', 7000000), 'hex') from item ¦ select repeat('x', 950000) from item a, item b
        select 1 from item where {deep}
    """,
}


def pieces(text: str) -> list[str]:
    return [
        part.strip() for part in re.split(r"\n|(?<!\|)\|(?!\|)" if "¦" not in text else r"\n|¦", text) if part.strip()
    ]


def bombs(engine: str) -> list[str]:
    deep = "(" * 3000 + "1=1" + ")" * 3000
    return [part.format(deep=deep) for part in re.split(r"\n|¦", BOMBS[engine]) for part in [part.strip()] if part]


class Grammar:
    """Statements of one seed for one engine; the same seed and names give the same statements."""

    def __init__(self, seed: int | str, engine: str, names: Names) -> None:
        self.rng = random.Random(f"{seed}/{engine}")
        self.engine, self.names, self.spice, self.serial = engine, names, 0.0, 0
        self.params: dict[str, Any] = {}
        self.ctes: Scope = []
        self.masked: set[str] = set()
        self.sets = {
            key: pieces(table[engine])
            for key, table in {
                "relation": RELATIONS,
                "value": VALUES,
                "statement": STATEMENTS,
                "puzzle": PUZZLES,
                "side": SIDE_RELATIONS,
            }.items()
        }
        self.bombs = bombs(engine)

    # -- whole statements

    def statement(self, bombs: float = 0.002) -> Statement:
        rng, roll = self.rng, self.rng.random()
        self.params, self.ctes, self.masked = {}, [], set()
        if rng.random() < bombs:
            return Statement(rng.choice(self.bombs), {}, kind="bomb")
        kind = "clean" if roll < 0.35 else "spiked" if roll < 0.75 else "hostile" if roll < 0.88 else "mangled"
        self.spice = 0.0 if kind == "clean" else 0.10
        sql = self.hostile() if kind == "hostile" else self.query(2)
        if kind == "mangled":
            sql = self.mangle(self.hostile() if rng.random() < 0.3 else sql)
        if kind != "clean" and rng.random() < 0.15:
            sql = self.disguise(sql)
        params = dict(self.params)
        if kind != "clean" and rng.random() < 0.1:
            params[rng.choice(["me", "n", "s", "ME", "me.team", "1", "principal", "branch", "_me", "p0"])] = (
                self.value()
            )
        branch, as_of = "main", None
        if kind != "clean" and rng.random() < 0.05:
            branch = rng.choice([*self.names.branches, "nosuch", "main'--", "MAIN", "", "main\x00"])
        if rng.random() < 0.12:
            as_of = (
                rng.randint(self.names.first_tx, self.names.last_tx)
                if kind == "clean"
                else rng.choice([0, 1, -1, 2**63 - 1, 2**70, rng.randint(1, self.names.last_tx)])
            )
        return Statement(sql, params, branch, as_of, kind)

    def hostile(self) -> str:
        rng = self.rng
        choice = rng.randrange(8)
        if choice < 3:
            return self.fill(rng.choice(self.sets["statement"]))
        if choice == 3:
            return f"select {rng.choice(['*', 'count(*)', '1', 'max(1)'])} from {self.fill(rng.choice(self.sets['relation']))}"
        if choice == 4:
            return f"select {self.fill(rng.choice(self.sets['value']))}{rng.choice(['', ' from item', ' from part'])}"
        if choice == 5:  # shadow a name, then read it
            name, target = (
                rng.choice([*self.names.readable, *self.names.hidden, *self.names.physical]),
                self.hidden_relation(),
            )
            recursive = rng.choice(["", "recursive "])
            return f"with {recursive}{self.quoted(name)} as (select * from {target}) select * from {self.quoted(name)}"
        if choice == 6:  # smuggle a second statement
            return (
                self.query(1)
                + rng.choice([";", "; ", ";--", ";/**/", " ;\n"])
                + self.fill(rng.choice(self.sets["statement"]))
            )
        return f"{self.query(1)} {rng.choice(['union', 'union all', 'except', 'intersect'])} select {self.fill(rng.choice(self.sets['value']))} from {self.hidden_relation()}"

    # -- SELECT

    def query(self, depth: int, shape: list[str] | None = None) -> str:
        rng, outer = self.rng, list(self.ctes)
        prefix = ""
        if depth > 0 and rng.random() < 0.3:
            prefix = self.with_clause(depth - 1)
        shape = shape or [rng.choice(["int", "text"]) for _ in range(rng.randint(1, 3))]
        sql = self.core(depth, shape)
        while depth > 0 and rng.random() < 0.15:
            sql += f" {rng.choice(['union', 'union all', 'except', 'intersect'])} {self.core(depth - 1, shape)}"
        if rng.random() < 0.3:
            sql += " order by " + ", ".join(f"{i + 1}{rng.choice(['', ' desc', ' asc'])}" for i in range(len(shape)))
        if rng.random() < 0.25:
            sql += f" limit {rng.randint(0, 20)}" + rng.choice(["", f" offset {rng.randint(0, 5)}"])
        self.ctes = outer
        return prefix + sql

    def with_clause(self, depth: int) -> str:
        rng, parts, recursive = self.rng, [], False
        for _ in range(rng.randint(1, 2)):
            # a CTE may take an entity's own name, the bypass that an authorizer by view name falls to
            taken = {cte for cte, _ in self.ctes}
            names = [name for name in (*self.names.readable, *self.names.hidden) if name not in taken]
            name = rng.choice(names) if names and rng.random() < 0.2 else self.fresh("c")
            if rng.random() < 0.2:
                recursive = True
                parts.append(
                    f"{name}(a1) as (select {self.expr('int', [], 0)} union all select a1 + 1 from {name} where a1 < {rng.randint(1, 50)})"
                )
                columns = {"a1": "int"}
            else:
                shape = [rng.choice(["int", "text"]) for _ in range(rng.randint(1, 3))]
                columns = {f"a{i}": kind for i, kind in enumerate(shape)}
                self.masked.add(name)  # inside its own body the name would be circular on SQLite
                parts.append(f"{name}({', '.join(columns)}) as ({self.query(depth, shape)})")
                self.masked.discard(name)
            self.ctes.append((name, columns))
        return f"with {'recursive ' if recursive else ''}{', '.join(parts)} "

    def core(self, depth: int, shape: list[str]) -> str:
        rng = self.rng
        if rng.random() < 0.04:
            return "select " + ", ".join(self.expr(kind, [], 1) for kind in shape)
        source, scope = self.source(depth)
        where = f" where {self.condition(scope, depth)}" if rng.random() < 0.6 else ""
        kind = rng.choice(["int", "text"])
        if rng.random() < 0.2 and "." in (key := self.column(kind, scope)):  # a bare literal would be an ordinal
            columns = [key if found == kind and rng.random() < 0.5 else self.aggregate(found, scope) for found in shape]
            having = f" having count(*) > {rng.randint(0, 2)}" if rng.random() < 0.3 else ""
            return f"select {', '.join(columns)} from {source}{where} group by {key}{having}"
        if rng.random() < 0.1:
            return f"select {', '.join(self.aggregate(kind, scope) for kind in shape)} from {source}{where}"
        columns = [
            self.window(scope) if kind == "int" and rng.random() < 0.1 else self.expr(kind, scope, depth)
            for kind in shape
        ]
        return f"select {'distinct ' if rng.random() < 0.1 else ''}{', '.join(columns)} from {source}{where}"

    def source(self, depth: int) -> tuple[str, Scope]:
        rng = self.rng
        sql, scope = self.relation(depth)
        joins = rng.choice([0, 0, 0, 1, 1, 2]) if depth > 0 else rng.choice([0, 0, 0, 0, 1])
        for _ in range(joins):
            other, more = self.relation(max(depth - 1, 0))
            if rng.random() < 0.7:
                sql += f" {rng.choice(['join', 'left join'])} {other} on {self.column('int', more)} = {self.column('int', scope)}"
            else:
                sql += (
                    f", {other}" if joins == 1 else f" cross join {other}"
                )  # a comma binds looser than a join after it
            scope = scope + more
        return sql, scope

    def relation(self, depth: int) -> tuple[str, Scope]:
        rng, alias = self.rng, self.fresh("t")
        if self.spiked():
            columns = rng.choice(list(self.names.readable.values()))
            text = self.hidden_relation() if rng.random() < 0.6 else self.fill(rng.choice(self.sets["side"]))
            return f"{text} {alias}", [(alias, columns)]
        if depth > 0 and rng.random() < 0.2:
            shape = [rng.choice(["int", "text"]) for _ in range(rng.randint(1, 3))]
            names = {f"b{i}": kind for i, kind in enumerate(shape)}
            source, scope = self.source(depth - 1)
            columns = ", ".join(f"{self.expr(kind, scope, depth - 1)} as {name}" for name, kind in names.items())
            return f"(select {columns} from {source}) {alias}", [(alias, names)]
        shadowed = {name for name, _ in self.ctes} | self.masked
        options = [
            *self.ctes * 2,
            *((name, columns) for name, columns in self.names.readable.items() if name not in shadowed),
        ]
        if not options:
            return f"(select 1 as b0) {alias}", [(alias, {"b0": "int"})]
        name, columns = rng.choice(options)
        return f"{name} {'as ' if rng.random() < 0.3 else ''}{alias}", [(alias, columns)]

    # -- expressions

    def column(self, kind: str, scope: Scope) -> str:
        rng = self.rng
        if scope and self.spiked():
            return f"{rng.choice(scope)[0]}.{rng.choice(self.names.hidden_columns)}"
        options = [f"{alias}.{name}" for alias, columns in scope for name, found in columns.items() if found == kind]
        return rng.choice(options) if options else self.literal(kind)

    def literal(self, kind: str) -> str:
        rng = self.rng
        if rng.random() < 0.1:
            name = f"p{len(self.params)}"
            self.params[name] = rng.randint(0, 9) if kind == "int" else rng.choice(["a", "bolt", "", "ß"])
            # PostgreSQL must guess an untyped parameter's type; the cast keeps the statement clean on both
            return f"cast(:{name} as {'integer' if kind == 'int' else 'text'})"
        return (
            str(rng.randint(0, 100))
            if kind == "int"
            else rng.choice(["'a'", "'bolt'", "'%o%'", "''", "'it''s'", "'--'", "'/*'", "';'"])
        )

    def expr(self, kind: str, scope: Scope, depth: int) -> str:
        rng = self.rng
        if self.spiked():
            return self.fill(rng.choice(self.sets["value" if rng.random() < 0.5 else "puzzle"]))
        if depth <= 0 or rng.random() < 0.4:
            return self.column(kind, scope) if scope and rng.random() < 0.8 else self.literal(kind)
        down = depth - 1
        if rng.random() < 0.06:
            source, inner = self.source(0)
            return f"(select {self.aggregate(kind, inner)} from {source})"
        if kind == "int":
            return rng.choice(
                [
                    lambda: f"({self.expr('int', scope, down)} {rng.choice('+-')} {self.expr('int', scope, down)})",
                    lambda: f"abs({self.expr('int', scope, down)})",
                    lambda: f"length({self.expr('text', scope, down)})",
                    lambda: f"coalesce({self.expr('int', scope, down)}, {self.literal('int')})",
                    lambda: (
                        f"case when {self.condition(scope, down)} then {self.expr('int', scope, down)} else {self.expr('int', scope, down)} end"
                    ),
                    lambda: f"nullif({self.expr('int', scope, down)}, {self.literal('int')})",
                    lambda: f"({self.expr('int', scope, down)} % {rng.randint(1, 9)})",
                ]
            )()
        return rng.choice(
            [
                lambda: f"({self.expr('text', scope, down)} || {self.expr('text', scope, down)})",
                lambda: f"lower({self.expr('text', scope, down)})",
                lambda: f"upper({self.expr('text', scope, down)})",
                lambda: f"substr({self.expr('text', scope, down)}, {rng.randint(1, 4)}, {rng.randint(0, 4)})",
                lambda: f"trim({self.expr('text', scope, down)})",
                lambda: f"replace({self.expr('text', scope, down)}, 'o', '0')",
                lambda: f"coalesce({self.expr('text', scope, down)}, 'none')",
                lambda: f"cast({self.expr('int', scope, down)} as text)",
                lambda: f"case when {self.condition(scope, down)} then {self.expr('text', scope, down)} end",
            ]
        )()

    def condition(self, scope: Scope, depth: int) -> str:
        rng, down = self.rng, depth - 1
        kind = rng.choice(["int", "text"])
        if depth <= 0 or rng.random() < 0.4:
            return f"{self.column(kind, scope)} {rng.choice(['=', '<>', '<', '>', '<=', '>='])} {self.literal(kind)}"
        return rng.choice(
            [
                lambda: f"({self.condition(scope, down)} and {self.condition(scope, down)})",
                lambda: f"({self.condition(scope, down)} or {self.condition(scope, down)})",
                lambda: f"not ({self.condition(scope, down)})",
                lambda: f"{self.expr(kind, scope, down)} is {rng.choice(['', 'not '])}null",
                lambda: f"{self.expr('text', scope, down)} like {rng.choice(['%bo%', '_%', '%'])!r}",
                lambda: f"{self.expr('int', scope, down)} between {self.literal('int')} and {self.literal('int')}",
                lambda: f"{self.expr(kind, scope, down)} in ({self.literal(kind)}, {self.literal(kind)})",
                lambda: f"{self.expr(kind, scope, down)} in ({self.query(min(down, 1), [kind])})",
                lambda: f"{rng.choice(['', 'not '])}exists ({self.query(min(down, 1))})",
                lambda: f"{self.expr(kind, scope, down)} = {self.expr(kind, scope, down)}",
            ]
        )()

    def aggregate(self, kind: str, scope: Scope) -> str:
        inner = self.column(kind, scope)
        if kind == "text":
            return self.rng.choice([f"max({inner})", f"min({inner})"])
        return self.rng.choice(
            [f"max({inner})", f"min({inner})", "count(*)", f"count(distinct {inner})", f"coalesce(max({inner}), 0)"]
        )

    def window(self, scope: Scope) -> str:
        order = f"order by {self.column('int', scope)}, {self.column('text', scope)}"
        part = f"partition by {self.column('text', scope)} " if self.rng.random() < 0.4 else ""
        name = self.rng.choice(
            ["row_number()", "rank()", "dense_rank()", "count(*)", f"max({self.column('int', scope)})"]
        )
        return f"{name} over ({part}{order})"

    # -- hostility

    def spiked(self) -> bool:
        return self.rng.random() < self.spice

    def hidden_relation(self) -> str:
        rng = self.rng
        if rng.random() < 0.4 and self.names.hidden:
            return self.quoted(rng.choice(self.names.hidden))
        return self.fill(rng.choice(self.sets["relation"]))

    def quoted(self, name: str) -> str:
        styles = [name, name, f'"{name}"', name.upper()] + (
            [f"[{name}]", f"`{name}`"] if self.engine == "sqlite" else [f'U&"{name}"']
        )
        return self.rng.choice(styles)

    def value(self) -> Any:
        return self.rng.choice(
            [0, 1, -1, 2**63 - 1, "x", "' or 1=1 --", "a\x00b", None, 1.5, True, b"\x00\xff", "\ud800", float("nan")]
        )

    def fill(self, text: str) -> str:
        physical = self.rng.choice(self.names.physical) if self.names.physical else "item__h"
        sequences = [name for name in self.names.physical if name.endswith("_seq")] or ["seq"]
        return text.format(scratch=self.names.scratch, physical=physical, sequence=sequences[0], deep="1=1")

    def fresh(self, prefix: str) -> str:
        self.serial += 1
        return f"{prefix}{self.serial % 1000}_"

    def disguise(self, sql: str) -> str:
        rng = self.rng
        return rng.choice(
            [
                lambda: f"/* {sql} */ select 1",
                lambda: f"/* /* */ {sql} /* */ */",
                lambda: f"-- x\n{sql} -- ; drop table item",
                lambda: sql.replace(" ", "/**/", 3),
                lambda: sql.replace(" ", "\t\n\r\f ", 2),
                lambda: f"{sql};",
                lambda: f"({sql})",
                lambda: f"select * from ({sql}) disguised",
                lambda: f"with d as ({sql}) select * from d",
                lambda: f"\ufeff{sql}",
                lambda: f"{sql}\x00; drop table item",
                lambda: f"explain {sql}",
                lambda: f"{sql} for update",
                lambda: f"{sql} --",
                lambda: f"{sql} /*",
                lambda: f"{sql} $$",
                lambda: f"select 1 where exists ({sql})",
                lambda: f"values (({sql}))",
                lambda: "".join(char.upper() if rng.random() < 0.5 else char for char in sql),
            ]
        )()

    def mangle(self, sql: str) -> str:
        """Damage the text: drop, double, swap or replace tokens, or put odd characters between them."""
        rng = self.rng
        tokens = re.findall(r"\s+|\w+|'[^']*'|.", sql, re.DOTALL)
        for _ in range(rng.randint(1, 3)):
            if not tokens:
                break
            at = rng.randrange(len(tokens))
            match rng.randrange(6):
                case 0:
                    del tokens[at]
                case 1:
                    tokens.insert(at, tokens[at])
                case 2:
                    other = rng.randrange(len(tokens))
                    tokens[at], tokens[other] = tokens[other], tokens[at]
                case 3:
                    tokens.insert(
                        at,
                        rng.choice(
                            [
                                ";",
                                "--",
                                "/*",
                                "*/",
                                "'",
                                '"',
                                "\x00",
                                "\\",
                                "$$",
                                "`",
                                "[",
                                "]",
                                "(",
                                ")",
                                "::",
                                "?",
                                "%",
                                "%s",
                                "%(n)s",
                                ":me",
                                "@",
                                "#",
                                "\u037e",
                                "\u2019",
                                "\u00a0",
                                "\u200b",
                                "\U0001f4a3",
                                "\x1a",
                                "{",
                                "}",
                                "||",
                                "->",
                                ".",
                                ",",
                            ]
                        ),
                    )
                case 4:
                    tokens[at] = rng.choice(
                        [
                            *self.names.hidden,
                            *self.names.hidden_columns,
                            *self.names.physical,
                            "main",
                            "temp",
                            "livinglayer",
                            "pg_catalog",
                            "\u0456tem",
                            "it\u0435m",
                            "\uff49\uff54\uff45\uff4d",
                            "ITEM",
                            "item__history",
                            "select",
                            "from",
                            "union",
                            "null",
                            "rowid",
                            "*",
                        ]
                    )
                case _:
                    tokens[at] = rng.choice(
                        [
                            self.fill(rng.choice(self.sets["value"])),
                            f"({self.query(0)})",
                            rng.choice(["0", "-1", "1e308", "0x10", "9223372036854775808", "''"]),
                        ]
                    )
        return "".join(tokens)
